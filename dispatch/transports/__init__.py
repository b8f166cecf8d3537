"""How records and rows travel. One small protocol (``base``), one module a transport."""
