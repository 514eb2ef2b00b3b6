"""What the customers of a city owe us."""


def report(connection, city):
    """Return rows (name, orders, cost, paid, open), through an sqlite3.Connection."""
    return connection.execute(
        """
        WITH costs AS (
            SELECT
                orders.customer AS customer,
                count(DISTINCT orders.id) AS orders,
                coalesce(sum(pieces * price), 0) AS cost
            FROM orders
            LEFT JOIN items ON items.purchase = orders.id
            WHERE state <> 'cancelled'
            GROUP BY orders.customer
        ),
        paid AS (
            SELECT customer, sum(amount) AS paid FROM payments GROUP BY customer
        )
        SELECT
            name,
            coalesce(orders, 0),
            coalesce(cost, 0),
            coalesce(paid, 0),
            coalesce(cost, 0) - coalesce(paid, 0) AS open
        FROM customers
        LEFT JOIN costs ON costs.customer = customers.id
        LEFT JOIN paid ON paid.customer = customers.id
        WHERE city = ?
        ORDER BY open DESC, name
        """,
        (city,),
    ).fetchall()
