"""What a training run is configured with: sections, presets, files of other trainers."""
