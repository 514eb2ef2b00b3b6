CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL);

CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    customer INTEGER NOT NULL REFERENCES customers (id),
    state TEXT NOT NULL -- new, sent or cancelled
);

-- an order may have no items yet; a price is that of one piece, in cents
CREATE TABLE items (
    id INTEGER PRIMARY KEY,
    purchase INTEGER NOT NULL REFERENCES orders (id),
    pieces INTEGER NOT NULL,
    price INTEGER NOT NULL
);

CREATE TABLE payments (
    id INTEGER PRIMARY KEY,
    customer INTEGER NOT NULL REFERENCES customers (id),
    amount INTEGER NOT NULL
);
