"""The pipeline: where models and data come from, export, the stages, the registry, the report and the command line."""
