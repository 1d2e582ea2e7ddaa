"""The stages that `dvc repro` runs, and what they depend on besides files and parameters."""
