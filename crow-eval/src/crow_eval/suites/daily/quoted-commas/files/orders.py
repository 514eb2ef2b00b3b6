"""Orders from a CSV file."""


def load_orders(path):
    """Return the orders of a file, each as a dict by the names in the file's first line."""
    with open(path, encoding="utf-8") as file:
        names = file.readline().strip().split(",")
        orders = []
        for line in file:
            order = dict(zip(names, line.strip().split(",")))
            order["quantity"] = int(order["quantity"])
            orders.append(order)
    return orders


def total_quantity(orders):
    return sum(order["quantity"] for order in orders)


if __name__ == "__main__":
    print(total_quantity(load_orders("orders.csv")))
