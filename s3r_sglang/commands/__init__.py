"""What lies behind the larger `s3r` commands."""
