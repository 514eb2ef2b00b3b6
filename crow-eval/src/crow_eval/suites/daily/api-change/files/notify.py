"""Tell customers that an order is late."""

from vendor import mailer


def notify_late(orders):
    """Write to the customers of late orders; return the addresses that could not be reached."""
    failed = []
    for order in orders:
        if order["days_late"] > 0:
            subject = f"Order {order['number']} is late"
            body = f"It is {order['days_late']} days late."
            if not mailer.send("shop@example.org", order["mail"], subject, body):
                failed.append(order["mail"])
    return failed
