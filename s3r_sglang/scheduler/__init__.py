"""What keeps rollouts going when their KV outgrows the GPU: whom to admit, pause and restore."""
