"""A bank, which many threads use."""

from contextlib import ExitStack
from threading import Lock


class Store:
    """Where the amounts are: in memory here, behind a network elsewhere."""

    def __init__(self, amounts):
        self.amounts = dict(amounts)

    def names(self):
        return list(self.amounts)

    def read(self, name):
        return self.amounts[name]

    def write(self, name, amount):
        self.amounts[name] = amount


class Bank:
    """The accounts of a store. The bank opens and closes none."""

    def __init__(self, store):
        self.store = store
        self.locks = {name: Lock() for name in store.names()}

    def hold(self, *names):
        """Hold the locks of accounts, taken in the order of their names, such that no two threads wait for each other."""
        held = ExitStack()
        for lock in [self.locks[name] for name in sorted(set(names))]:
            held.enter_context(lock)
        return held

    def balance(self, name):
        """Return the amount of an account; raise KeyError where there is none of this name."""
        with self.hold(name):
            return self.store.read(name)

    def total(self):
        """Return the amounts of all accounts together."""
        with self.hold(*self.store.names()):
            return sum(self.store.read(name) for name in self.store.names())

    def transfer(self, source, target, amount):
        """Move an amount; raise ValueError if it is not above zero, or more than the source has.

        Where an account does not exist, raise KeyError. Nothing changes then.
        """
        if amount <= 0:
            raise ValueError("an amount is above zero")
        with self.hold(source, target):
            available = self.store.read(source)
            present = self.store.read(target)
            if amount > available:
                raise ValueError(f"{source} has only {available}")
            if source != target:
                self.store.write(source, available - amount)
                self.store.write(target, present + amount)
