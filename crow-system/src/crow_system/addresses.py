"""IP addresses of the public internet."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

PUBLIC_V6 = ip_network("2000::/3")
NAT64 = ip_network("64:ff9b::/96")
ISATAP = {bytes.fromhex("00005efe"), bytes.fromhex("02005efe")}
NOT_PUBLIC = [
    ip_network("168.63.129.16"),  # Azure's platform services
    ip_network("192.0.0.0/24"),  # protocol assignments, with the metadata service of one cloud
    ip_network("192.88.99.0/24"),  # 6to4 relays
    ip_network("2001::/23"),  # Teredo and other protocols
    ip_network("2002::/16"),  # 6to4
    ip_network("3fff::/20"),  # documentation
]
"""Networks that are not public although `is_global` of some Python versions says so."""


def is_public(address: str) -> bool:
    """Return whether an address is on the public internet.

    Loopback, private and link-local addresses are not, nor are clouds' metadata services and tunnels such as 6to4.
    """
    ip: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        if inner := ip.ipv4_mapped or (IPv4Address(ip.packed[-4:]) if ip in NAT64 else None):
            ip = inner
        elif ip not in PUBLIC_V6 or ip.packed[8:12] in ISATAP:
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in NOT_PUBLIC)
