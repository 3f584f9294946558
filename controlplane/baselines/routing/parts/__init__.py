"""Parts that several of these policies share: room, queues as engines report them, scores, hashed homes."""
