"""Send the report of a week."""

from vendor import mailer


def send_report(totals, recipients):
    """Send the totals to recipients, which commas separate; return whether they could be reached."""
    if not totals:
        raise ValueError("there is nothing to report")
    lines = [f"{article}: {pieces}" for article, pieces in sorted(totals.items())]
    return mailer.send_html("reports@example.org", recipients, "Report", "\n".join(lines))
