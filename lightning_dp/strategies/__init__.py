"""Lightning strategies that train privately: the mixin, the parts of its fits, and ``install``."""
