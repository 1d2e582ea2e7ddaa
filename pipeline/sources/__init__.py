"""Where checkpoints and data come from: locations, the download cache, the Source artifact and its texts."""
