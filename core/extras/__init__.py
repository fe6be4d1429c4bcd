"""Code that a flag or a separate command switches on. The default run needs none of it."""
