"""Weight gradients: deferred by B, stored, and accumulated by W."""
