"""HTTP/1.1 over asyncio and httptools: the server of gateways and workers, and the client between them."""
