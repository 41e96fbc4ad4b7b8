"""Access: nobody is taken for somebody else, on either kind of wire."""

import pytest

from pion_grpc.core.access import PASSWORD_BYTES_MAX, TENANTS_MAX, Access
from pion_wire.limits import TENANT_BYTES_MAX

ACCESS = Access({"": "secret", "blue": "azure"})


@pytest.mark.parametrize(
    ("user", "password", "lenient", "strict"),
    [
        ("", "secret", "", ""),
        (None, "secret", "", ""),
        ("blue", "azure", "blue", "blue"),
        ("default", "secret", "", None),  # a name of its own, as clients of Redis send it
        ("blue", "secret", None, None),
        ("", "azure", None, None),
        ("default", "azure", None, None),
        ("", "", None, None),
        ("blue", "", None, None),
        ("default", "", None, None),
    ],
)
def test_no_password_opens_what_is_anothers(
    user: str | None, password: str, lenient: str | None, strict: str | None
) -> None:
    assert ACCESS.tenant(user, password.encode()) == lenient
    assert ACCESS.tenant(user, password.encode(), strict=True) == strict


def test_without_a_password_none_is_right() -> None:
    everybody = Access({})
    assert not everybody.required
    assert everybody.tenant("", b"") is None


@pytest.mark.parametrize(
    "tenants",
    [
        {"a:b": "c"},
        {"n" * (TENANT_BYTES_MAX + 1): "c"},
        {"blue": ""},
        {"blue": "p" * (PASSWORD_BYTES_MAX + 1)},
        {f"t{number}": "c" for number in range(TENANTS_MAX + 1)},
    ],
)
def test_an_unusable_tenant_is_not_configured(tenants: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="--tenant"):
        Access({"": "secret", **tenants})


def test_the_longest_name_and_password_are_not_refused() -> None:
    name, password = "n" * TENANT_BYTES_MAX, "p" * PASSWORD_BYTES_MAX
    assert Access({"": "secret", name: password}).tenants == {name}
