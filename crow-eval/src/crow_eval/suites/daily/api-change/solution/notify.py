"""Tell customers that an order is late."""

from vendor import mailer


def notify_late(orders):
    """Write to the customers of late orders; return the addresses that could not be reached."""
    outbox = mailer.Outbox("shop@example.org")
    failed = []
    for order in orders:
        if order["days_late"] > 0:
            subject = f"Order {order['number']} is late"
            body = f"It is {order['days_late']} days late."
            try:
                outbox.deliver(mailer.Message((order["mail"],), subject, body))
            except mailer.DeliveryFailed:
                failed.append(order["mail"])
    return failed
