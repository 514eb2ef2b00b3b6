"""Export what was sold, by region. A sale is a dict with region, pieces and price, and perhaps returned."""


def sum_up(sales, minimum):
    """Return rows (region, pieces, total) of the regions that reach the minimum, the highest total first."""
    totals = {}
    counts = {}
    for sale in sales:
        if sale.get("returned"):
            continue
        region = (sale["region"] or "unknown").strip().title()
        totals[region] = totals.get(region, 0) + sale["pieces"] * sale["price"]
        counts[region] = counts.get(region, 0) + sale["pieces"]
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    return [(region, counts[region], f"{total:.2f}") for region, total in ordered if total >= minimum]


def as_csv(sales, minimum=0):
    """Return the turnover of the regions that reach the minimum, as CSV."""
    lines = ["region,pieces,total"]
    for region, count, total in sum_up(sales, minimum):
        quoted = region.replace('"', '""')
        lines.append(f'"{quoted}",{count},{total}')
    return "\n".join(lines) + "\n"


def as_markdown(sales, minimum=0):
    """Return the turnover of the regions that reach the minimum, as a Markdown table."""
    lines = ["| region | pieces | total |", "|---|---|---|"]
    for region, count, total in sum_up(sales, minimum):
        escaped = region.replace("|", "\\|")
        lines.append(f"| {escaped} | {count} | {total} |")
    return "\n".join(lines) + "\n"


def as_html(sales, minimum=0):
    """Return the turnover of the regions that reach the minimum, as an HTML table."""
    lines = ["<table>"]
    for region, count, total in sum_up(sales, minimum):
        escaped = region.replace("&", "&amp;").replace("<", "&lt;")
        lines.append(f"<tr><td>{escaped}</td><td>{count}</td><td>{total}</td></tr>")
    return "\n".join([*lines, "</table>"]) + "\n"
