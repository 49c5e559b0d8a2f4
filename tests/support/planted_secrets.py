"""One made-up secret of each kind that the rules know, and where to look for them afterwards."""

from typing import Final

import asyncpg

# Put together here, so that no scanner of this repository takes them for real.
SAMPLES: Final = {
    "private_key": "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    "aws_access_key": "AKIA" + "IOSFODNN7EXAMPLE",
    "google_api_key": "AIza" + "SyA" + "b1" * 16,
    "google_oauth_token": "ya29." + "a0AfH6SMBx" * 3,
    "azure_storage_key": "AccountKey=" + "Ab1+" * 21 + "Ab==",
    "github_token": "ghp_" + "a1B2" * 9,
    "gitlab_token": "glpat-" + "x1y2" * 5,
    "slack_token": "xoxb-" + "123456789012-abcdef",
    "slack_webhook": "https://hooks.slack.com/services/" + "T00000000/B00000000/" + "X" * 24,
    "model_api_key": "sk-" + "proj-" + "a1B2" * 8,
    "huggingface_token": "hf_" + "AbCd" * 8,
    "stripe_key": "sk_live_" + "4eC39HqLyjWDarjt",
    "package_token": "npm_" + "a1B2" * 9,
    "sendgrid_key": "SG." + "a" * 22 + "." + "b" * 43,
    "rara_token": "rara_client_" + "a1B-" * 10 + "xyz",
    "jwt": "eyJhbGciOiJIUzI1" + ".eyJzdWIiOiIxMjM0" + ".SflKxwRJSMeKKF2Q",
    "url_with_password": "postgres://app:" + "s3cr3t-7f" + "@db.internal:5432/app",
}


async def everything_stored(raw: "asyncpg.Connection[asyncpg.Record]") -> bytes:
    """Every value of every table, bytes as bytes."""
    tables = await raw.fetch("select format('%I.%I', schemaname, tablename) as name from pg_tables"
                             " where schemaname not in ('pg_catalog', 'information_schema')")  # fmt: skip
    assert len(tables) > 20
    kept = []
    for table in tables:
        for row in await raw.fetch(f"select * from {table['name']}"):
            kept += [value if isinstance(value, bytes) else str(value).encode() for value in row.values()]
    return b"\n".join(kept)
