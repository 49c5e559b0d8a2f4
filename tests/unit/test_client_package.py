"""The client's package: what others may import."""

import rara_client


def test_all_names_what_the_package_offers() -> None:
    offered = {
        name
        for name, value in vars(rara_client).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("rara_client")
    }
    assert offered == set(rara_client.__all__)
    assert rara_client.__all__ == sorted(rara_client.__all__)
