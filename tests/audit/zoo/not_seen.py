"""Bad modules that no check sees yet, or ever, with the reason; the documentation lists them."""

__all__ = ["NOT_SEEN"]

NOT_SEEN: dict[str, str] = {}
