"""The release plan in a database, for gateways and commands that do not see one folder.

Nothing of a change is in a gateway or in the command that began it: whichever dies, another command goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from runtime.gateway.fleet.release import (
    PlanAwayError,
    PlanRefusedError,
    ReleasePlan,
    ReleasePlanError,
    changed_meanwhile,
)
from tapeout.database import DatabaseError, create_tables, open_database, refusal
from tapeout.errors import one_line
from tapeout.file_errors import file_problem

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table


class PlanTable:
    """A :class:`runtime.gateway.fleet.release.PlanStore`. ``url``: of SQLAlchemy; ``fleet``: the name of its row.

    :class:`tapeout.database.DatabaseError` for a wrong URL; the database need not answer yet.
    """

    def __init__(self, url: str, fleet: str) -> None:
        self._engine, self._table, self._fleet, self._created = open_database(url, "releases"), _table(), fleet, False

    def __str__(self) -> str:
        return f"the plan {self._fleet} in {self._engine.url.render_as_string(hide_password=True)}"

    def read(self) -> ReleasePlan | None:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            self._create()
            with self._engine.connect() as connection:
                found = self._row(connection)
        except (SQLAlchemyError, DatabaseError) as error:
            raise self._failure(error) from error
        return self._parsed(found)

    def write(self, plan: ReleasePlan | None, before: ReleasePlan | None) -> None:
        import sqlalchemy as sa
        from sqlalchemy.exc import IntegrityError, SQLAlchemyError

        row = {} if plan is None else {"fleet": self._fleet, "plan": plan.model_dump_json()}
        try:
            self._create()
            with self._engine.begin() as connection:
                found = self._row(connection)
                if self._parsed(found) != before:
                    raise changed_meanwhile(self)
                if found is None:
                    if row:
                        connection.execute(sa.insert(self._table).values(row))
                    return
                change = sa.update(self._table).values(row) if row else sa.delete(self._table)
                same = sa.and_(self._table.c.fleet == self._fleet, self._table.c.plan == found)
                if not connection.execute(change.where(same)).rowcount:
                    raise changed_meanwhile(self)
        except IntegrityError as error:  # another command has inserted the row
            raise changed_meanwhile(self) from error
        except (SQLAlchemyError, DatabaseError) as error:
            raise self._failure(error) from error

    def _row(self, connection: Connection) -> str | None:
        import sqlalchemy as sa

        query = sa.select(self._table.c.plan).where(self._table.c.fleet == self._fleet)
        return connection.execute(query).scalar_one_or_none()

    def _parsed(self, found: str | None) -> ReleasePlan | None:
        try:
            return None if found is None else ReleasePlan.model_validate_json(found)
        except ValidationError as error:
            raise ReleasePlanError(
                f"{self} is no release plan: {file_problem(error, ReleasePlan)}",
                expected="what `tapeout fleet release` has written",
                remedy="remove that row, and release again",
            ) from error

    def _failure(self, error: Exception) -> PlanAwayError:
        place = "`releases` in the file of the fleet"
        found = error if isinstance(error, DatabaseError) else refusal(error, "releases", str(self), place)
        if found is not None:
            return PlanRefusedError(found.found, expected=found.expected, remedy=found.remedy)
        cause = one_line(getattr(error, "orig", None) or error)  # without the statement
        return PlanAwayError(
            f"the database of the release plan does not answer: {cause}",
            expected="a database that answers",
            remedy="start it; a release goes on where it was when its command is run again",
        )

    def _create(self) -> None:
        if not self._created:
            create_tables(self._engine, self._table.metadata)
            self._created = True


def _table() -> Table:
    import sqlalchemy as sa

    return sa.Table(
        "release_plans",
        sa.MetaData(),
        sa.Column("fleet", sa.String(255), primary_key=True),  # as long as the name of a file can be
        sa.Column("plan", sa.Text, nullable=False),
    )
