"""Commands that try to leave the sandbox: none writes, reads or reaches what lies outside.

Each script prints ESCAPED, or leaves a trace outside, if it gets out.
"""

import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from crow_sandbox.hidden import read_table

NAME = "crow-escape"
CALLS = """
import ctypes, errno, os, struct, socket, sys, signal, fcntl
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments))
    return result, errno.errorcode.get(ctypes.get_errno(), "")
def escaped(result): print("ESCAPED", result) if result[0] >= 0 else print(result)
def attempt(function, *arguments):
    try: print("ESCAPED", function(*arguments))
    except OSError as error: print(error)
"""


@pytest.fixture(scope="module")
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user outside of the sandbox."""
    with subprocess.Popen(["/bin/sleep", "600"], env={"SECRET": "of a stranger"}) as process:
        yield process
        assert process.poll() is None  # nobody ended it
        process.kill()


# writing

FOLDERS = [
    "/", "/bin", "/boot", "/dev", "/dev/shm", "/dev/mqueue", "/etc", "/etc/cron.d", "/etc/profile.d",
    "/etc/ld.so.conf.d",
    "/home", "/lib", "/lib/systemd/system", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/run/lock", "/sbin",
    "/srv",
    "/sys", "/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/kernel/debug", "/usr", "/usr/bin", "/usr/lib",
    "/usr/local/bin",
    "/usr/share", "/var", "/var/cache", "/var/lib", "/var/log", "/var/spool", "/var/spool/cron", "/var/tmp", "/tmp",
    "~", "~/.ssh", "~/.config", "~/.config/autostart", "~/.config/crow", "~/.local/bin", "~/.local/share", "~/.cache",
    "~/.cargo/bin", "~/.local/share/crow", "~/.local/share/crow/sandbox", "~/beside", "~/beside/.git/hooks",
    "~/project/..",
    "/proc/1/cwd", "/proc/1/root", "/proc/self/root", "/proc/self/cwd/..", "/proc/sys/fs/binfmt_misc",
    "~/project/../beside",
]  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS)
def test_new_file_does_not_appear_outside(world, folder: str):
    path = folder.replace("~", str(world.home))
    if folder.startswith("~"):
        Path(path).mkdir(parents=True, exist_ok=True)
    world.shell(f"cd {path} && echo x > {NAME} && mkdir {NAME}-folder; ln -s /etc/passwd {path}/{NAME}-link; true")
    real = path.replace("/proc/1/", "/nowhere/").replace("/proc/self/cwd", str(world.root))
    found = [name for name in (NAME, f"{NAME}-folder", f"{NAME}-link") if os.path.lexists(os.path.join(real, name))]
    assert not found


FILES = [
    "/etc/passwd", "/etc/group", "/etc/shadow", "/etc/sudoers", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf",
    "/etc/fstab",
    "/etc/crontab", "/etc/profile", "/etc/bash.bashrc", "/etc/environment", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/bin/sh",
    "/usr/bin/env", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/randomize_va_space", "/proc/sys/kernel/yama/ptrace_scope", "/proc/sys/kernel/dmesg_restrict",
    "/proc/sys/kernel/unprivileged_bpf_disabled", "/proc/sys/kernel/panic", "/proc/sys/kernel/pid_max",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/vm/drop_caches", "/proc/sys/fs/file-max", "/proc/sys/fs/suid_dumpable",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/user/max_user_namespaces", "/proc/sysrq-trigger", "/proc/mtrr", "/proc/irq/default_smp_affinity",
    "/proc/kcore",
    "/proc/kmsg", "/proc/timer_list", "/proc/fs/nfsd/threads", "/proc/acpi/wakeup", "/proc/bus/pci/devices",
    "/proc/scsi/scsi",
    "/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/loop0",
    "/dev/loop-control",
    "/dev/fuse", "/dev/net/tun", "/dev/kvm", "/dev/vsock", "/dev/console", "/dev/tty0", "/dev/tty1", "/dev/vcs",
    "/dev/uinput",
    "/sys/power/state", "/sys/kernel/uevent_helper", "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/fs/cgroup/memory/release_agent",
    "/sys/fs/cgroup/memory/cgroup.procs", "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/unified/cgroup.procs",
    "/sys/module/kernel/parameters/panic", "/sys/block/vda/queue/scheduler", "/sys/devices/system/cpu/cpu1/online",
    "~/.bashrc", "~/.profile", "~/.zshrc", "~/.gitconfig", "~/.npmrc", "~/.config/crow/config.toml", "~/beside/file",
    "/proc/1/exe", "/proc/1/mem", "/proc/1/environ", "/proc/1/oom_score_adj", "/proc/self/exe",
]  # fmt: skip
OF_SANDBOX = ("/proc/1/mem", "/proc/1/oom_score_adj")
"""Files of the sandbox's own first process."""


@pytest.mark.parametrize("file", FILES)
def test_file_outside_is_not_opened_for_writing(world, file: str):
    path = file.replace("~", str(world.home))
    if file.startswith("~"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    if not os.path.exists(path) and not file.startswith("/proc/1"):
        pytest.skip("not on this machine")
    result = world.python(f"{CALLS}\nattempt(os.open, {path!r}, os.O_WRONLY | os.O_APPEND)")
    assert result.returncode == 0, result.stderr
    assert "ESCAPED" not in result.stdout or file in OF_SANDBOX


@pytest.mark.parametrize(
    "change",
    [
        "os.chmod(p, 0o777)", "os.utime(p, (0, 0))", "os.remove(p)", "os.rename(p, p + '2')", "os.truncate(p, 0)",
        "os.chown(p, os.getuid(), os.getgid())",
        "os.setxattr(p, 'user.x', b'1')", "os.link(p, p + '2')", "os.link(p, 'linked')", "os.rename(p, 'moved')",
        "os.rename('file', p)", "os.link('file', p + '2')",
        "os.symlink('/', p + '2')", "os.mkfifo(p + '2')", "os.rmdir(os.path.dirname(p))", "os.mknod(p + '2')",
        "os.open(p, os.O_RDWR)", "os.open(os.path.dirname(p), os.O_TMPFILE | os.O_RDWR)",
        "fcntl.ioctl(os.open(p, os.O_RDONLY), 0x40086602, struct.pack('l', 0x10))",
        "os.open(f'/proc/self/fd/{os.open(p, os.O_RDONLY)}', os.O_WRONLY)",
        "os.remove('name', dir_fd=os.open(os.path.dirname(p), os.O_RDONLY))",
        "os.open('file', os.O_WRONLY, dir_fd=os.open(os.path.dirname(p), os.O_PATH))",
        "os.posix_fallocate(os.open(p, os.O_RDONLY), 0, 100)", "os.removexattr(p, 'user.y')",
        "os.open(os.path.join('/proc/self/cwd', '../beside/file'), os.O_WRONLY)",
        "__import__('mmap').mmap(os.open(p, os.O_RDONLY), 4, prot=2)",
    ],
)  # fmt: skip
def test_file_outside_is_not_changed(world, change: str):
    path = world.beside / "file"
    before = (
        path.read_bytes(),
        path.stat().st_mode,
        path.stat().st_mtime_ns,
        path.stat().st_ino,
        sorted(os.listdir(world.beside)),
    )
    result = world.python(f"{CALLS}\np = {str(path)!r}\nattempt(lambda: {change})")
    assert result.returncode == 0, result.stderr
    assert "ESCAPED" not in result.stdout
    assert before == (
        path.read_bytes(),
        path.stat().st_mode,
        path.stat().st_mtime_ns,
        path.stat().st_ino,
        sorted(os.listdir(world.beside)),
    )


# what the kernel offers

SYSTEM_CALLS = {  # name: number on x86_64, arguments
    "mount a tmpfs": (165, b"none", b"/tmp", b"tmpfs", 0, 0),
    "bind the root": (165, b"/", b"/tmp", b"", 4096, 0),
    "remount / writable": (165, b"", b"/", b"", 32 | 4096, 0),
    "remount proc": (165, b"proc", b"/proc", b"proc", 0, 0),
    "move a mount": (165, b"/proc", b"/tmp", b"", 8192, 0),
    "make / shared": (165, b"", b"/", b"", 1 << 20, 0),
    "unmount what hides": (166, b"/run", 2),
    "unmount /proc/sys": (166, b"/proc/sys", 2),
    "unmount /proc": (166, b"/proc", 2),
    "pivot the root": (155, b"/tmp", b"/tmp"),
    "chroot": (161, b"/tmp"),
    "open_tree clone": (428, -100, b"/", 1 | 0x8000),
    "fsopen": (430, b"tmpfs", 0),
    "fspick": (433, -100, b"/", 0),
    "mount_setattr": (442, -100, b"/", 0, b"\0" * 32, 32),
    "unshare users": (272, 0x10000000),
    "unshare mounts": (272, 0x00020000),
    "unshare pids": (272, 0x20000000),
    "unshare the network": (272, 0x40000000),
    "unshare ipc": (272, 0x08000000),
    "unshare names": (272, 0x04000000),
    "unshare cgroups": (272, 0x02000000),
    "unshare time": (272, 0x00000080),
    "clone with users": (56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone with mounts": (56, 0x00020000 | 17, 0, 0, 0, 0),
    "make a block device": (133, b"device", 0o060600, 0xFE00),
    "make a character device": (133, b"device", 0o020600, 0x0101),
    "set the host name": (170, b"evil", 4),
    "set the domain": (171, b"evil", 4),
    "set the clock": (227, 0, b"\0" * 16),
    "set the time": (164, b"\0" * 16, 0),
    "load a module": (175, b"\0", 1, b""),
    "load a module from a file": (313, 0, b"", 0),
    "remove a module": (176, b"ext4", 0),
    "kexec": (246, 0, 0, 0, 0),
    "reboot": (169, 0xFEE1DEAD, 672274793, 0, 0),
    "swap on": (167, b"/dev/vda", 0),
    "account": (163, b"/tmp/account"),
    "quotas": (179, 0x800002 << 8, b"/dev/vda", 0, 0),
    "ports": (172, 3),
    "port range": (173, 0, 1, 1),
    "kernel log": (103, 5, 0, 0),
    "add a key": (248, b"user", b"crow", b"x", 1, -3),
    "request a key": (249, b"user", b"crow", b"", -3),
    "session keyring": (250, 0, -3, 0),
    "user keyring": (250, 0, -4, 0),
    "io_uring": (425, 8, b"\0" * 120),
    "bpf": (321, 0, b"\0" * 72, 72),
    "perf events": (298, b"\0" * 112, 0, -1, -1, 0),
    "userfaultfd": (323, 1),
    "open by handle": (304, -100, b"\x08\0\0\0\x01\0\0\0\x02\0\0\0\0\0\0\0", 0),
    "x32": (0x40000000 + 39,),
    "become another user": (105, 12345),
    "become another group": (106, 12345),
    "groups": (116, 0, 0),
    "lower the nice value": (141, 0, 0, -10),
    "real time": (144, 0, 1, b"\x01\0\0\0"),
    "lock memory": (250, 11, 0),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
@pytest.mark.parametrize("name", SYSTEM_CALLS)
def test_system_call_is_refused(world, name: str):
    result = world.python(f"{CALLS}\nescaped(call(*{SYSTEM_CALLS[name]!r}))")
    assert "ESCAPED" not in result.stdout, result.stdout
    assert result.stdout, result.stderr  # it was tried


@pytest.mark.parametrize(
    "family", [3, 4, 5, 9, 15, 17, 21, 29, 31, 38, 40, 44]
)  # packet, key, TIPC, Bluetooth, AF_ALG, vsock, XDP …
def test_socket_of_an_unusual_family_is_refused(world, family: int):
    result = world.python(f"{CALLS}\nfor kind in (1, 2, 3, 5): attempt(socket.socket, {family}, kind)")
    assert "ESCAPED" not in result.stdout
    assert "not supported by protocol" in result.stdout


@pytest.mark.parametrize("request_", ["TIOCSTI", "TIOCLINUX", "0x100005412"])
def test_terminal_is_not_typed_into(world, request_: str):
    code = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}.get(request_) or int(request_, 16)
    script = (
        f"{CALLS}\na, b = os.openpty()\nescaped(call(16, b, {code}, b'x'))\nattempt(os.open, '/dev/tty', os.O_RDWR)"
    )
    result = world.python(script)
    assert "EPERM" in result.stdout
    assert "ESCAPED" not in result.stdout


def test_no_capability_is_left(world):
    lines = world.shell("cat /proc/self/status").stdout.splitlines()
    assert {line.split()[1] for line in lines if line.startswith("Cap")} == {"0" * 16}
    assert "NoNewPrivs:\t1" in lines


@pytest.mark.parametrize(
    "program",
    [
        "su",
        "sudo",
        "mount",
        "umount",
        "passwd",
        "chsh",
        "newgrp",
        "ping",
        "pkexec",
        "fusermount3",
        "newuidmap",
        "at",
        "crontab",
    ],
)
def test_setuid_program_gains_nothing(world, program: str):
    if not (found := shutil.which(program)):
        pytest.skip("not on this machine")
    copy = world.root / f"own-{program}"
    result = world.shell(
        f"{found} --help >/dev/null 2>&1; cp {found} {copy}; chmod 4755 {copy}; {copy} --version >/dev/null 2>&1;"
        " grep -h -E '^(CapEff|CapPrm)' /proc/self/status;"
        "grep ' / ' /proc/self/mountinfo | head -1; id -u",
    )
    assert re.findall(r"Cap\w+:\t0{16}", result.stdout)
    assert result.stdout.split()[-1] == str(os.getuid())
    assert "nosuid" in result.stdout


@pytest.mark.parametrize(
    "command",
    [
        "unshare -Ur true", "unshare -r true", "unshare -m true", "unshare -n true", "unshare -p -f true",
        "unshare -U true", "nsenter -t 1 -m true", "nsenter -t 1 -a true",
        "chroot / true", "mount -t tmpfs none /mnt", "mount -o remount,rw /", "mount --bind / /mnt",
        "umount -l /proc", "umount /run", "mount -t proc proc /mnt", "mount -t overlay o /mnt",
        "mknod device c 1 3", "mknod device b 254 0", "chown 1:1 file", "ip link add dummy0 type dummy",
        "ip addr add 10.9.8.7/8 dev lo", "setcap cap_sys_admin+ep file",
        "BWRAP --ro-bind / / true", "BWRAP --unshare-user --ro-bind / / true",
        "BWRAP --dev-bind / / --cap-add ALL true", "dmesg", "swapon /dev/vda", "losetup /dev/loop0 file",
        "sysctl -w kernel.hostname=evil", "hostname evil", "date -s 2001-01-01", "chattr +i /etc/passwd",
        "setfattr -n security.capability -v x file", "fusermount3 -o rw x",
    ],
)  # fmt: skip
def test_command_of_an_administrator_fails(world, command: str):
    bwrap = str(next(iter(p for p in __import__("crow_sandbox.bubblewrap", fromlist=["x"]).find_programs())))
    if command.split()[0] != "BWRAP" and not shutil.which(command.split()[0]):
        pytest.skip("not on this machine")
    assert world.shell(command.replace("BWRAP", bwrap)).returncode != 0


# processes outside

PROCESS_SCRIPTS = {
    "ptrace": "escaped(call(101, 16, PID, 0, 0))",
    "seize": "escaped(call(101, 0x4206, PID, 0, 0))",
    "read memory": "b = ctypes.create_string_buffer(8); v = struct.pack('PP', ctypes.addressof(b), 8)\n"
    "escaped((libc.process_vm_readv(PID, v, 1, v, 1, 0), ''))",
    "kill": "attempt(os.kill, PID, 9)",
    "stop": "attempt(os.kill, PID, signal.SIGSTOP)",
    "probe": "attempt(os.kill, PID, 0)",
    "kill all": "import subprocess\n"
    "print(subprocess.run(['/bin/sh', '-c', 'kill -9 -1'], start_new_session=True).returncode)",
    "kill the group": "attempt(os.killpg, PID, 9)",
    "pidfd": "attempt(os.pidfd_open, PID)",
    "root": "attempt(os.listdir, '/proc/PID/root')",
    "cwd": "attempt(os.listdir, '/proc/PID/cwd')",
    "mem": "attempt(open, '/proc/PID/mem', 'rb')",
    "environ": "attempt(open, '/proc/PID/environ', 'rb')",
    "fd": "attempt(os.listdir, '/proc/PID/fd')",
    "exe": "attempt(os.readlink, '/proc/PID/exe')",
    "limits": "attempt(__import__('resource').prlimit, PID, 7, (1, 1))",
    "affinity": "attempt(os.sched_setaffinity, PID, {0})",
    "priority": "attempt(os.setpriority, 0, PID, 19)",
    "kcmp": "escaped(call(312, PID, 1, 0, 0, 0))",
    "seen": "for p in os.listdir('/proc'):\n"
    "    if p.isdecimal() and 'of a stranger' in open(f'/proc/{p}/environ').read(): print('ESCAPED')",
    "parents": "print('ESCAPED' if os.getppid() not in (0, 1, 2, 3) else '')",
    "namespace of the first process": "import glob\nfor f in glob.glob('/proc/1/ns/*'):\n"
    "    if os.readlink(f) != os.readlink(f.replace('/1/', '/self/')): escaped(call(308, os.open(f, os.O_RDONLY), 0))",
    "memory of the first process": "print('ESCAPED' if b'of-the-user' in open('/proc/1/environ', 'rb').read() else '')",
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESS_SCRIPTS)
def test_process_outside_is_out_of_reach(world, stranger, name: str):
    result = world.python(
        f"{CALLS}\n{PROCESS_SCRIPTS[name].replace('PID', str(stranger.pid))}", env={"API_TOKEN": world.secret}
    )
    assert "ESCAPED" not in result.stdout, result.stdout
    assert result.returncode in (0, 137), result.stderr
    assert stranger.poll() is None
    state = Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert state in "SR"


def test_descriptors_of_crow_are_not_inherited(world):
    with open(world.beside / "file") as file:
        os.set_inheritable(file.fileno(), True)
        result = world.shell("for d in /proc/self/fd/*; do readlink $d; done")
    assert str(world.beside) not in result.stdout
    assert len(result.stdout.split()) <= 5  # the three, that of the list, and a link to it


def test_processes_end_with_their_command(world):
    marker = f"6{os.getpid()}"
    world.shell(f"setsid sleep {marker} >/dev/null 2>&1 & disown; true")
    for _ in range(100):
        listed = subprocess.run(["pgrep", "-f", f"sleep {marker}"], capture_output=True, text=True).stdout
        if not listed:
            return
        time.sleep(0.02)
    pytest.fail(f"it lives: {listed}")


# sockets and memory


def listen(path: str | bytes, kind: int = socket.SOCK_STREAM) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, kind)
    server.bind(path)
    if kind == socket.SOCK_STREAM:
        server.listen()
    return server


@pytest.mark.parametrize("kind", ["STREAM", "DGRAM"])
@pytest.mark.parametrize(
    "place", ["home", "tmp", "beside", "root", "docker", "ssh-agent", "gpg-agent", "link", "late", "abstract"]
)
def test_socket_outside_is_out_of_reach(world, place: str, kind: str):
    paths = {
        "home": world.home / "service", "tmp": world.base / "tmp/s",
        "beside": world.beside / "s", "root": world.root / "s",
        "docker": world.home / ".docker/run/docker.sock",
        "ssh-agent": world.home / ".ssh/agent", "gpg-agent": world.home / ".gnupg/S.gpg-agent",
        "link": world.home / "elsewhere/s", "late": world.home / ".ssh/late",
    }  # fmt: skip
    path = f"\0crow-test-{os.getpid()}" if place == "abstract" else str(paths[place])
    if place != "abstract":
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    server = listen(path, getattr(socket, f"SOCK_{kind}"))
    target = path
    if place == "link":
        target = str(world.root / "link-to-socket")
        os.symlink(path, target)
    try:
        result = world.python(
            f"{CALLS}\nattempt(socket.socket(socket.AF_UNIX, socket.SOCK_{kind}).connect, {target!r})"
        )
        assert result.returncode == 0, result.stderr
        assert "ESCAPED" not in result.stdout
    finally:
        server.close()
        for each in {path, target} - {path if place == "abstract" else ""}:
            os.unlink(each)


def test_socket_and_pipe_made_in_the_home_meanwhile_are_out_of_reach(world):
    late, pipe = world.home / "late", world.home / "pipe"
    run = world.begin()
    script = f"""{CALLS}
print(flush=True); input()
attempt(socket.socket(socket.AF_UNIX).connect, {str(late)!r})
attempt(os.open, {str(pipe)!r}, os.O_WRONLY | os.O_NONBLOCK)
"""
    wrapped, env = run.wrap([os.path.realpath(sys.executable), "-I", "-c", script], os.environ, str(world.root), ())
    with subprocess.Popen(wrapped, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with listen(str(late)):
            os.mkfifo(pipe)
            reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            output = process.communicate(b"\n", timeout=60)[0]
            os.close(reader)
    late.unlink()
    pipe.unlink()
    assert output.count(b"Errno") == 2, output


@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
def test_server_on_loopback_is_out_of_reach(world, family: str):
    try:
        server = socket.create_server((family, 0), family=socket.AF_INET6 if ":" in family else socket.AF_INET)
    except OSError:
        pytest.skip("not on this machine")
    with server:
        result = world.python(f"{CALLS}\nattempt(socket.create_connection, ({family!r}, {server.getsockname()[1]}), 3)")
    assert "ESCAPED" not in result.stdout
    assert result.stdout


@pytest.mark.parametrize("script", [
    "attempt(socket.create_connection, ('192.0.2.1', 80), 2)",
    "attempt(socket.getaddrinfo, 'example.com', 80)",
    "attempt(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b'x', ('192.0.2.1', 53))",
    "attempt(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b'x', ('169.254.169.254', 80))",
    "attempt(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto, b'x', ('2001:db8::1', 53))",
    "attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)",
    "print('ESCAPED' if len(socket.if_nameindex()) > 1 else '')",
])  # fmt: skip
def test_network_is_out_of_reach(world, script: str):
    result = world.python(f"{CALLS}\n{script}")
    assert "ESCAPED" not in result.stdout
    assert result.stdout


def test_shared_memory_is_the_commands_own(world):
    name = f"/dev/shm/crow-test-{os.getpid()}"
    Path(name).write_text(world.secret)
    try:
        result = world.shell(f"cat {name}; ls -A /dev/shm; echo x > {name}; ls /dev/mqueue 2>/dev/null")
        assert world.secret not in result.stdout
        assert Path(name).read_text() == world.secret
        assert Path(name).name not in result.stdout
    finally:
        os.unlink(name)


@pytest.mark.parametrize(
    ("get", "remove"),
    [("shmget(77, 4096, 0o1600)", "shmctl"), ("msgget(77, 0o1600)", "msgctl"), ("semget(77, 1, 0o1600)", "semctl")],
)
def test_memory_of_system_v_is_the_commands_own(world, get: str, remove: str):
    script = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    made = subprocess.run([sys.executable, "-c", f"{script}print(libc.{get})"], capture_output=True, text=True).stdout
    try:
        opened = get.replace("0o1600", "0o600")
        result = world.python(
            f"{CALLS}\nescaped((libc.{opened}, ''))\nprint(len(open('/proc/sysvipc/{get[:3]}').readlines()))"
        )
        assert "ESCAPED" not in result.stdout
        assert result.stdout.split()[-1] == "1"
    finally:
        arguments = f"{int(made)}, 0, 0" if remove != "semctl" else f"{int(made)}, 0, 0, 0"
        subprocess.run([sys.executable, "-c", f"{script}libc.{remove}({arguments})"], check=True)


# links, races, loaders


@pytest.mark.parametrize("script", [
    "ln -s {o} l; echo evil > l/file", "ln -s {o}/file l; echo evil > l", "ln -s {o}/file l; cp -f file l",
    "ln {o}/file l && echo evil > l", "ln -s / l; echo evil > l{o}/file",
    "mkdir d; mv d {o}/d", "echo evil | tee {o}/file", "cp file {o}/file", "mv file {o}/file",
    "dd if=file of={o}/file", "sed -i s/o/e/ {o}/file", "install file {o}/file", "truncate -s 0 {o}/file",
    "rm -rf {o}", "rm -rf ..", "rm -rf ~", "rsync file {o}/file", "tar cf - file | tar xf - -C {o}", "git init {o}",
    "cd ..; rm -rf beside", "python3 -c 'open(\"{o}/file\",\"w\")'",
    "exec 7>{o}/file",
    "echo evil > $(grep -o 'upperdir=[^,]*' /proc/self/mountinfo | tail -1 | cut -d= -f2)/planted",
    "mkdir -p a/b; cd a/b; rm -rf ../../../beside",
    "printf 'int x;' > evil.c; echo {o} > /etc/ld.so.preload", "ln -sfn {o} file; echo evil > file/file",
    "find {o} -delete", "chmod -R 777 {o}", "touch {o}/file", "ln -sf {o} {o}/../project",
])  # fmt: skip
def test_shell_does_not_change_what_is_outside(world, script: str):
    before = {
        path.name: (path.read_text(), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in world.beside.glob("file")
    }
    listed = sorted(os.listdir(world.beside)), sorted(os.listdir(world.home)), sorted(os.listdir(world.root))
    result = world.shell(script.replace("{o}", str(world.beside)))
    assert before == {
        path.name: (path.read_text(), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in world.beside.glob("file")
    }, result
    assert listed == (sorted(os.listdir(world.beside)), sorted(os.listdir(world.home)), sorted(os.listdir(world.root)))
    assert (world.root / "file").read_text() == "the root's\n"


def test_race_between_a_link_and_a_file_does_not_lead_outside(world):
    script = f"""{CALLS}
import threading
def swap():
    for number in range(1000):
        os.symlink({str(world.beside)!r}, 'new'); os.rename('new', 'swapped')
        os.symlink('.', 'new'); os.rename('new', 'swapped')
thread = threading.Thread(target=swap); thread.start()
tries = 0
while thread.is_alive() or tries < 1000:
    tries += 1
    try:
        with open('swapped/file', 'a') as file: file.write('evil')
    except OSError: pass
print(tries)
"""
    before = (world.beside / "file").read_text()
    result = world.python(script)
    assert int(result.stdout) >= 1000, result.stderr
    assert (world.beside / "file").read_text() == before


def test_race_outside_does_not_lead_a_command_outside(world):
    """A folder of the root is replaced by a link to outside, again and again, while a command writes below it."""
    moving, ended = world.root / "moving", threading.Event()
    moving.mkdir()
    (moving / "file").write_text("x")
    before = (world.beside / "file").read_text()

    def swap() -> None:
        while not ended.is_set():
            moving.rename(world.root / "away")
            moving.symlink_to(world.beside)
            moving.unlink()
            (world.root / "away").rename(moving)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        world.shell("for i in $(seq 1000); do echo evil 2>/dev/null >> moving/file; done 2>/dev/null; true")
    finally:
        ended.set()
        thread.join()
    assert (world.beside / "file").read_text() == before
    shutil.rmtree(moving)


@pytest.mark.parametrize(
    "file",
    [
        "libc.so.6",
        "sitecustomize.py",
        ".envrc",
        "bin/sh",
        "bwrap",
        "python3",
        ".git/hooks/pre-commit",
        "usercustomize.py",
        "true",
    ],
)
def test_program_planted_in_the_root_does_not_run_outside(world, file: str):
    script = (
        f"mkdir -p $(dirname {file}); printf '#!/bin/sh\\ntouch {world.beside}/planted\\n' > {file}; chmod +x {file}"
    )
    run = world.begin()
    world.shell(script, run=run)
    variables = {
        "PATH": f"{world.root}:{world.root}/bin:{os.environ['PATH']}",
        "LD_PRELOAD": "",
        "PYTHONPATH": str(world.root),
    }
    world.shell("true", run=run, env=variables)
    assert not (world.beside / "planted").exists()
    assert not (world.root / file).exists()


@pytest.mark.parametrize(
    "variable", ["LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "BASH_ENV", "ENV", "PS4", "SHELLOPTS"]
)
def test_what_starts_the_sandbox_loads_nothing_of_the_command(world, variable: str):
    """Only the command itself gets such a variable."""
    value = "xtrace" if variable == "SHELLOPTS" else f"$(touch {world.beside}/planted)"
    run = world.begin()
    wrapped, env = run.wrap(["/usr/bin/env"], {"PATH": "/bin:/usr/bin", variable: value}, str(world.root), ())
    assert variable not in env
    result = subprocess.run(wrapped, env=env, capture_output=True, text=True)
    assert (f"{variable}={value}" in result.stdout) == (variable not in ("BASH_ENV", "ENV"))
    assert not (world.beside / "planted").exists()


# reading


def to_example(pattern: str) -> str:
    return re.sub(r"\*", "example", pattern)


@pytest.mark.parametrize("pattern", [path for path in read_table().paths if path.startswith("~")])
@pytest.mark.sampled(3)
def test_credential_is_not_read(world, pattern: str):
    path = Path(to_example(pattern).replace("~", str(world.home)))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not re.search(r"\.\w{2,}$|_", path.name):
        path.mkdir(exist_ok=True)
        (path / "inner").mkdir(exist_ok=True)
        (path / "inner/key").write_text(world.secret)
    else:
        path.write_text(world.secret)
    result = world.shell(
        f"ls -A {path}; cat {path} {path}/* {path}/*/* 2>/dev/null; tar cf - {path} 2>/dev/null;"
        f" cp -r {path} copied; cat copied copied/inner/key; grep -r cret {path}",
    )
    assert world.secret not in result.stdout
    assert "inner" not in result.stdout.split("\n")[0]
    if path.is_dir() and not path.is_relative_to(world.sandbox.folder.parent):
        shutil.rmtree(path)


@pytest.mark.parametrize("place", ["~/.ssh", "~/.kaggle/credentials", "~/.npmrc", "~/.bashrc"])
def test_credential_is_not_read_through_a_link(world, place: str):
    path, real = Path(place.replace("~", str(world.home))), world.home / "dotfiles" / Path(place).name
    real.parent.mkdir(exist_ok=True)
    if path.parent != world.home:
        path.parent.unlink(missing_ok=True)
        path.parent.mkdir()
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    real.write_text(f"token = {world.secret}\n") if place != "~/.ssh" else real.mkdir()
    if real.is_dir():
        (real / "key").write_text(world.secret)
    path.symlink_to(real)
    result = world.shell(
        f"cat {path} {path}/key {real} {real}/key; ln -s {path} l; cat l l/key; cat /proc/self/root{real}"
    )
    assert world.secret not in result.stdout
    path.unlink()
    shutil.rmtree(real) if real.is_dir() else real.unlink()


@pytest.mark.parametrize(
    "file",
    [
        ".npmrc",
        ".gitconfig",
        ".bashrc",
        ".zshrc",
        ".config/pip/pip.conf",
        ".cargo/config.toml",
        ".config/fish/config.fish",
        ".curlrc",
    ],
)
@pytest.mark.parametrize("line", [
    "//registry.npmjs.org/:_authToken={s}", "export OPENAI_API_KEY={s}",
    "index-url = https://me:{s}@pypi.example/simple", "password={s}", "set -gx GH_TOKEN {s}",
    'token = "{s}"', "header = Authorization: Bearer {s}", "extraheader = AUTHORIZATION: basic {s}",
    "AWS_SECRET_ACCESS_KEY={s}",
])  # fmt: skip
@pytest.mark.sampled(4)
def test_settings_are_read_without_their_secrets(world, file: str, line: str):
    path = world.home / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"registry = https://example.com\n{line.replace('{s}', world.secret)}\nlast = 1\n")
    assert world.shell(f"cat {path}").stdout == "registry = https://example.com\nlast = 1\n"
    path.unlink()


@pytest.mark.parametrize("name", [
    "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN",
    "GITHUB_TOKEN", "GH_TOKEN", "GITLAB_TOKEN", "NPM_TOKEN", "NODE_AUTH_TOKEN",
    "PYPI_TOKEN", "UV_PUBLISH_TOKEN", "UV_PUBLISH_PASSWORD", "TWINE_PASSWORD", "CARGO_REGISTRY_TOKEN", "HF_TOKEN",
    "SLACK_BOT_TOKEN", "STRIPE_SECRET_KEY", "PGPASSWORD", "MYSQL_PWD",
    "DATABASE_URL", "SENTRY_DSN", "AZURE_CLIENT_SECRET", "GOOGLE_APPLICATION_CREDENTIALS", "VAULT_TOKEN",
    "DOCKER_AUTH_CONFIG", "CI_JOB_TOKEN", "ACTIONS_RUNTIME_TOKEN", "SSH_AUTH_SOCK",
    "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST", "XDG_RUNTIME_DIR", "KUBECONFIG", "openai_api_key", "MY_PASSWORD",
    "SECRET", "TOKEN", "PASSWORD", "RAILS_MASTER_KEY", "SECRET_KEY_BASE",
    "JWT_SECRET", "SMTP_PASS", "AZURE_PAT", "COOKIE", "ACCESS_TOKEN", "AUTH", "XAUTHORITY", "DISPLAY",
    "GPG_AGENT_INFO", "BW_SESSION", "ENCRYPTION_KEY", "TF_VAR_token",
])  # fmt: skip
@pytest.mark.sampled(4)
def test_variable_with_a_secret_is_not_read(world, name: str):
    result = world.shell(
        "env; tr '\\0' '\\n' < /proc/1/environ; cat /proc/*/environ", env={name: world.secret, "ORDINARY": "stays"}
    )
    assert world.secret not in result.stdout
    assert "ORDINARY=stays" in result.stdout


@pytest.mark.parametrize("value", ["postgres://me:{s}@db/x", "https://token:{s}@example.com", "amqp://:{s}@h"])
def test_variable_with_a_password_in_an_address_is_not_read(world, value: str):
    assert world.secret not in world.shell("env", env={"WHERE": value.replace("{s}", world.secret)}).stdout


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "PATH",
        "HOME",
        "LANG",
        "CI",
        "KEYMAP",
        "PASSENGER",
        "SECRETARY",
        "AUTHOR",
        "GIT_AUTHOR_NAME",
        "PWD",
        "OLDPWD",
        "MONKEY_PATCH",
        "TERM",
        "EDITOR",
        "COMPASS",
    ],
)
def test_ordinary_variable_stays(world, name: str):
    assert f"{name}=" in world.shell("env", env={name: os.environ.get(name, "x")}).stdout


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow",
        "/etc/gshadow",
        "/proc/kcore",
        "/proc/keys",
        "/var/log",
        "/run/docker.sock",
        "/var/run/docker.sock",
        "/run/user",
        "/run/dbus",
    ],
)
def test_data_of_the_machine_is_not_read(world, path: str):
    assert world.shell(f"cat {path} 2>/dev/null | head -c 100; ls -A {path}/ 2>/dev/null").stdout == ""


@pytest.mark.parametrize("level", ["workspace", "read-only"])
@pytest.mark.parametrize(
    "path", ["~/beside/file", "~/.ssh/key", "~/.local/share/crow/x", "/etc/passwd", "/usr/local/x"]
)
def test_other_levels_keep_commands_inside_too(world, level, path: str):
    real = Path(path.replace("~", str(world.home)))
    before = real.read_bytes() if real.is_file() else None
    world.shell(f"echo evil >> {real}; echo {level} > written", run=world.begin(level))
    assert before == (real.read_bytes() if real.is_file() else None)
    assert (world.root / "written").exists() == (level == "workspace")
    (world.root / "written").unlink(missing_ok=True)


def test_mount_made_outside_meanwhile_is_not_written(world):
    """Mounts outside are seen in the sandbox, where they are made below a folder that is: they stay read-only."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root mounts")
    place = world.home / "mounted"
    place.mkdir(exist_ok=True)
    run = world.begin()
    wrapped, env = run.wrap(
        ["/bin/sh", "-c", f"echo ready; read x; echo evil > {place}/evil"], dict(os.environ), str(world.root), ()
    )
    with subprocess.Popen(
        wrapped, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        if subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], capture_output=True).returncode:
            process.kill()
            pytest.skip("this machine does not mount")
        try:
            process.communicate(b"\n", timeout=60)
            assert os.listdir(place) == []
        finally:
            subprocess.run(["umount", str(place)], check=True)


def test_upper_folder_is_neither_seen_nor_written(world):
    run = world.begin()
    upper = run.layers[0].upper
    result = world.shell(
        f"ls -A {upper}; ls -A {world.sandbox.folder}; echo x > {upper}/planted; ls {world.sandbox.folder.parent}",
        run=run,
    )
    assert result.stdout == ""
    assert not (upper / "planted").exists()
    assert stat.S_IMODE(run.folder.stat().st_mode) == 0o700
