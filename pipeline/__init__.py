"""Stage wiring: recipe, artifact store, sources, export, registry, report and the command line."""
