"""What the customers of a city owe us."""


def report(connection, city):
    """Return rows (name, orders, cost, paid, open), through an sqlite3.Connection."""
    return connection.execute(f"""
        SELECT
            name,
            count(orders.id),
            sum(pieces * price),
            sum(amount),
            sum(pieces * price) - sum(amount) AS open
        FROM customers
        JOIN orders ON orders.customer = customers.id
        JOIN items ON items.purchase = orders.id
        JOIN payments ON payments.customer = customers.id
        WHERE city = '{city}' AND state <> 'cancelled'
        GROUP BY name
        ORDER BY open DESC, name
    """).fetchall()
