"""The tables. Whatever changes here needs a migration (a test compares both).

Times are unix seconds of the cluster's time (see `clock`). Everything that belongs to one session hangs on
its row by foreign keys; what must outlive it (bytes still to be freed on nodes) is in `reclaims`.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# Paths are compared byte by byte: a subtree is the range between "dir/" and "dir0", in every database.
_PATH = Text().with_variant(Text(collation="C"), "postgresql")
_ID = String(32)

cluster = Table(
    "cluster",
    metadata,
    Column("row", Integer, primary_key=True, autoincrement=False),  # always 1: one cluster a database
    Column("cluster", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("watched_at", Double, nullable=False),  # when a control process last watched the leases
    # The cluster's time then, less what the database's clock said.
    Column("clock_ahead_s", Double, nullable=False, server_default="0"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("node", String(64), primary_key=True),
    Column(
        "state", String(8), nullable=False
    ),  # "joined" or "left"; dead is joined without a fresh heartbeat
    Column("incarnation", BigInteger, nullable=False),
    Column("served", BigInteger, nullable=False, server_default="0"),  # the incarnation last heard of
    Column("addresses", JSON, nullable=False),
    Column("http", Text, nullable=False),
    Column("capacity_bytes", BigInteger, nullable=False),
    Column("used_bytes", BigInteger, nullable=False),
    Column("evictable_bytes", BigInteger, nullable=False, server_default="0"),  # of used_bytes
    Column("has_log", Boolean, nullable=False, server_default=false()),  # comes back with what it flushed
    Column("log_trouble", Boolean, nullable=False, server_default=false()),  # does not flush: takes no files
    Column("files", BigInteger, nullable=False),
    Column("stats", JSON, nullable=False),
    Column("config_hash", String(128), nullable=False),
    Column("registered_at", Double, nullable=False),
    Column("heartbeat_at", Double, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session", _ID, primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("kv_identity", String(256), nullable=False),
    Column("format_name", String(64), nullable=False),
    Column("bytes_per_token", BigInteger, nullable=False),
    Column("granule", Integer, nullable=False),
    Column("model", String(256)),
    Column("priority", Integer, nullable=False),
    Column("ttl_s", BigInteger),
    Column("version", BigInteger, nullable=False),  # compare-and-swap: rises by one with each commit
    Column("tokens", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("next_number", Integer, nullable=False),  # of the next <n>.kv
    Column("last_plan", _ID),  # the plan of the last commit: enough to answer a repeated commit
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("expires_at", Double),
    Index(None, "tenant", "session"),
    Index(None, "expires_at"),
)

files = Table(
    "files",
    metadata,
    Column("file", _ID, primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("path", _PATH, nullable=False),
    Column("parent", _PATH, nullable=False),
    Column("is_dir", Boolean, nullable=False),
    Column("class", String(16), nullable=False),
    Column("stripe_unit", Integer, nullable=False),
    Column("width", Integer, nullable=False),
    Column("kv_identity", String(256)),
    # It lives as long as any session's segment names it, and belongs to one of those: only that one goes on
    # writing it.
    Column("session", _ID, ForeignKey("sessions.session", ondelete="CASCADE")),
    Column("ids_of", _ID),  # a `.tokens` file: the KV file whose token ids it holds
    # Upper bound of the seal on the nodes: raised before they are asked, so that a seal whose commit failed
    # is known.
    Column("sealed", BigInteger, nullable=False),
    Column("write_grant", BigInteger, nullable=False),  # the highest that was given out; 0: plain file
    Column("created_at", Double, nullable=False),
    UniqueConstraint("tenant", "path"),
    Index(None, "tenant", "parent", "path"),
    Index(None, "session"),
    Index(None, "ids_of"),
)

file_columns = Table(
    "file_columns",
    metadata,
    Column("file", _ID, ForeignKey("files.file", ondelete="CASCADE"), primary_key=True),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
    # The node's incarnation when the column was placed, or the last one that reported it after a restart.
    Column("born", BigInteger, nullable=False),
    # The first byte that is missing below what was written, as the node said; null: nothing is.
    Column("valid", BigInteger),
    Column("node", String(64), ForeignKey("nodes.node"), nullable=False),
    Index(None, "node"),
)

segments = Table(
    "segments",
    metadata,
    Column(
        "session", _ID, ForeignKey("sessions.session", ondelete="CASCADE"), primary_key=True, nullable=False
    ),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("token_start", BigInteger, nullable=False),
    Column("token_length", BigInteger, nullable=False),
    Column("file", _ID, ForeignKey("files.file"), nullable=False),
    Column("kv_start", BigInteger, nullable=False),
    Column("kv_length", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),  # of all the session's ids from 0 to this segment's end
    Index(None, "file"),
)

plans = Table(
    "plans",
    metadata,
    Column("plan", _ID, primary_key=True),
    Column("session", _ID, ForeignKey("sessions.session", ondelete="CASCADE"), nullable=False),
    Column("request_id", String(256), nullable=False),
    Column("version", BigInteger, nullable=False),  # the session's when the plan was made
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("max_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("cached_digest", String(64), nullable=False),
    Column("file", _ID, ForeignKey("files.file")),  # the fresh one; null: nowhere to write
    Column("kv_start", BigInteger, nullable=False),
    Column("write_grant", BigInteger, nullable=False),
    Column("kv_identity", String(256), nullable=False),
    Column("format_name", String(64), nullable=False),
    Column("bytes_per_token", BigInteger, nullable=False),
    Column("granule", Integer, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("commit_began_at", Double),  # when its commit last went to the node to seal; null: not yet
    Index(None, "session"),
    Index(None, "file"),
    Index(None, "expires_at"),
)

reclaims = Table(
    "reclaims",
    metadata,
    Column("file", _ID, primary_key=True),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("node", String(64), ForeignKey("nodes.node"), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("next_try_at", Double, nullable=False),
    Index(None, "node", "next_try_at"),
)
