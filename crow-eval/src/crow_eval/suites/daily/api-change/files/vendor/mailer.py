"""Send mails (version 2). This copy keeps them in a list."""

from dataclasses import dataclass

DELIVERED = []


class DeliveryFailed(Exception):
    """A recipient cannot be reached."""


@dataclass(frozen=True)
class Message:
    recipients: tuple
    subject: str
    text: str
    html: str | None = None


class Outbox:
    """The mails of one sender."""

    def __init__(self, sender):
        self.sender = sender

    def deliver(self, message):
        """Send a message; raise DeliveryFailed if one of its recipients cannot be reached."""
        if not isinstance(message.recipients, tuple):
            raise TypeError("the recipients are a tuple of addresses")
        for address in message.recipients:
            if address != address.strip() or "," in address:
                raise ValueError(f"{address!r} is not an address")
            if address.endswith(".invalid"):
                raise DeliveryFailed(address)
        DELIVERED.append((self.sender, message))
