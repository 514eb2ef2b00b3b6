"""Orders from a CSV file."""

import csv


def load_orders(path):
    """Return the orders of a file, each as a dict by the names in the file's first line."""
    with open(path, encoding="utf-8", newline="") as file:
        return [{**row, "quantity": int(row["quantity"])} for row in csv.DictReader(file)]


def total_quantity(orders):
    return sum(order["quantity"] for order in orders)


if __name__ == "__main__":
    print(total_quantity(load_orders("orders.csv")))
