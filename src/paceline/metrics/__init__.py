"""What the server counts and how Prometheus sees it. Used by `server/`, which it does not know."""
