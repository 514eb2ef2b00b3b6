"""Send the report of a week."""

from vendor import mailer


def send_report(totals, recipients):
    """Send the totals to recipients, which commas separate; return whether they could be reached."""
    if not totals:
        raise ValueError("there is nothing to report")
    text = "\n".join(f"{article}: {pieces}" for article, pieces in sorted(totals.items()))
    addresses = tuple(address.strip() for address in recipients.split(","))
    message = mailer.Message(addresses, "Report", text, html=f"<pre>{text}</pre>")
    try:
        mailer.Outbox("reports@example.org").deliver(message)
    except mailer.DeliveryFailed:
        return False
    return True
