"""The evidence database: SQLAlchemy models, schema migrations, locks and one repository.

    with open_database("sqlite:///autotune.db") as database:
        repository = Repository(database)

Nothing is imported here, so that a process which only needs the errors does not load SQLAlchemy.

Rules that hold throughout:

- Every repository call is one transaction, committed before it returns: what was reported as stored
  survives a kill -9. No transaction is ever open between two calls, because an Optuna call inside one
  would wait for our write lock in the same file until it times out.
- A row that states a measurement is never rewritten with another measurement; see
  ``Repository.save_proofs`` for the one exception, which can only make a verdict stricter.
- Every failure of the database is a ``StoreError`` whose message is one line.
"""
