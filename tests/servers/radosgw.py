"""Ceph's S3 server on loopback, with one monitor and one disk: the only one here that is a production server, keeps its
objects, and whose conditional writes are atomic."""

import os
import shutil
import subprocess
import uuid
from pathlib import Path

from tests.servers.s3_servers import S3Server

_PROGRAMS = ("radosgw", "ceph-mon", "ceph-osd", "ceph")
_INSTALL = "apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd"
_STEP_SECS = 120
_CONF = """[global]
fsid = {id}
mon host = [v2:127.0.0.1:{mon},v1:127.0.0.1:{old_mon}]
auth cluster required = none
auth service required = none
auth client required = none
run dir = {folder}/run
pid file = {folder}/run/$name.pid
admin socket = {folder}/run/$name.asok
log file = {folder}/$name.log
mon data = {folder}/mon
osd data = {folder}/osd
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon max pg per osd = 1000
osd crush chooseleaf type = 0
osd objectstore = bluestore
bluestore block create = true
bluestore block size = 6442450944
bluestore cache autotune = false
bluestore cache size = 67108864
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd max object name len = 460
osd max object namespace len = 64
[client.rgw]
# Without it, and without authentication, the gateway waits for ever.
ms mon client mode = crc
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw data = {folder}/rgw
rgw enable usage log = false
rgw gc max objs = 8
rgw thread pool size = 32
"""


class Radosgw(S3Server):
    """Monitor, disk and gateway: three processes. Needs root."""

    missing = None if all(map(shutil.which, _PROGRAMS)) and os.geteuid() == 0 else f"no radosgw; as root: {_INSTALL}"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "testkey", "testsecret", num_ports=3)

    def commands(self) -> list[list[str]]:
        """The three processes; the monitor must run before the disk and the gateway's user can be made."""
        conf = str(self.folder / "ceph.conf")
        root = ["--setuser", "root", "--setgroup", "root"]
        monitor = ["ceph-mon", "-c", conf, "-i", "a", "-f", *root]
        disk = ["ceph-osd", "-c", conf, "-i", "0", "-f", *root]
        if not Path(conf).exists():
            self._make(conf, root, monitor, disk)
        return [monitor, disk, ["radosgw", "-c", conf, "-n", "client.rgw", "-f", *root]]

    def _make(self, conf: str, root: list[str], monitor: list[str], disk: list[str]) -> None:
        for name in ("run", "mon", "osd"):
            (self.folder / name).mkdir()
        id_, disk_id = str(uuid.uuid4()), str(uuid.uuid4())
        ports = {"port": self.port, "mon": self.port + 1, "old_mon": self.port + 2}
        Path(conf).write_text(_CONF.format(id=id_, folder=self.folder, **ports))
        place = f"[v2:127.0.0.1:{ports['mon']},v1:127.0.0.1:{ports['old_mon']}]"
        monmap = str(self.folder / "monmap")
        _do(["monmaptool", "-c", conf, "--create", "--clobber", "--addv", "a", place, "--fsid", id_, monmap])
        _do(["ceph-mon", "-c", conf, "-i", "a", "--mkfs", "--monmap", monmap, *root])
        first = [subprocess.Popen(monitor, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
        try:
            _do(["ceph", "-c", conf, "osd", "new", disk_id])
            _do(["ceph-osd", "-c", conf, "-i", "0", "--mkfs", "--osd-uuid", disk_id, *root])
            first.append(subprocess.Popen(disk, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            user = ["--uid=test", "--display-name=test", f"--access-key={self.key}", f"--secret={self.secret}"]
            _do(["radosgw-admin", "-c", conf, "-n", "client.rgw", "user", "create", *user])
        finally:
            for process in first:
                process.kill()
                process.wait()


def _do(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_SECS, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-500:]}{done.stderr[-1500:]}"
