"""`s3r bench-kv`: whole rollouts that outgrow the KV pool, under each way of scheduling them."""
