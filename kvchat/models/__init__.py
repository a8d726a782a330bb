"""Models: where they are (`find`), how they come here (`pull`, `convert`), which can be served (`families`), and opening
one (`load`)."""
