"""The engine libraries, one leaf module each, imported only when a bundle asks for it."""
