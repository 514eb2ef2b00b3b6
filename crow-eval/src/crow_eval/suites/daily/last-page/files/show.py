"""Print the orders, page by page."""

from pages import page, page_count

ORDERS = [f"order {number}" for number in range(1, 26)]

for number in range(1, page_count(ORDERS) + 1):
    print(f"page {number}:", ", ".join(page(ORDERS, number)))
