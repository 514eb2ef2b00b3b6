"""Classification of addresses as public or not."""

import pytest
from crow_system.addresses import is_public
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.255.255.255",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.0.1",
        "100.64.0.1",  # shared by a provider's customers
        "100.100.100.200",  # Alibaba's metadata
        "169.254.169.254",  # most clouds' metadata
        "169.254.170.2",
        "168.63.129.16",  # Azure's
        "192.0.0.192",  # Oracle's
        "192.0.2.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "192.88.99.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",  # compatible
        "::ffff:127.0.0.1",  # mapped
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:0:127.0.0.1",  # translated
        "64:ff9b::127.0.0.1",  # NAT64
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::7f00:1",
        "2001::1",  # Teredo
        "2001:db8::1",
        "2002:7f00:1::",  # 6to4
        "2002:a9fe:a9fe::1",
        "2606:4700::5efe:7f00:1",  # ISATAP
        "2606:4700::200:5efe:a9fe:a9fe",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",  # Amazon's metadata
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "100::1",
    ],
)
def test_address_is_not_public(address: str):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "8.8.8.8",
        "93.184.215.14",
        "172.15.255.255",
        "172.32.0.1",
        "192.0.1.1",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
        "2606:4700:4700::1111",
        "2a00:1450:4001::1",
    ],
)
def test_address_is_public(address: str):
    assert is_public(address)


@given(st.ip_addresses(v=4))
def test_ipv4_address_mapped_to_ipv6_is_as_public_as_itself(address: object):
    assert is_public(f"::ffff:{address}") == is_public(f"64:ff9b::{address}") == is_public(str(address))
