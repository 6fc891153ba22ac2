"""Ways into S3R for trainers."""
