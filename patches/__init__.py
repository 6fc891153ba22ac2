"""Every seam of SGLang that S3R changes, one module each; see INVENTORY.md."""
