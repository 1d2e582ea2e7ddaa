"""The model registry: register, promote, roll back, and where the bundles it points to are kept."""
