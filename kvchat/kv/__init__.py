"""The packed key-value cache: how it is stored (`format`), kept (`cache`), rotated (`rope`) and attended to (`attention`)."""
