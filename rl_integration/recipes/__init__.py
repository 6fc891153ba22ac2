"""S3R behind other trainers; docs/guides/trainers.md says what was run and what was not."""
