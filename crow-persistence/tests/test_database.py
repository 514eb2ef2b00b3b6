from crow_persistence.database import Database
from crow_persistence.tables import blobs
from sqlalchemy import insert, select


def test_what_is_written_is_read_back(database: Database) -> None:
    with database.writing() as connection:
        connection.execute(insert(blobs).values(hash="a", data=b"1"))
    with database.reading() as connection:
        assert connection.scalar(select(blobs.c.data)) == b"1"
