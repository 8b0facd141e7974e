use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use gd2fs_wire::messages::OpenReply;
use gd2fs_wire::{Code, Opcode, Role};

use super::*;

#[test]
fn a_restart_loses_bytes_and_says_so() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    peer.write(handle, 0, b"abc");
    let newer = Capability { columns: vec![(4, 1)], file: "5".repeat(32), ..capability() };
    peer.open(&newer);
    let bench = bench.restart();
    let mut peer = bench.peer();
    let answer = peer.try_open(&capability());
    assert!(serde_json::from_slice::<OpenReply>(&answer.ext).unwrap().lost);
    assert_eq!(answer.header.incarnation, 2);
    let handle = answer.header.handle;
    assert_eq!(peer.read(handle, 0, 3).code(), Code::Lost);
    assert_eq!(peer.write(handle, 0, b"new").code(), Code::Ok);
    assert_eq!(peer.read(handle, 0, 3).payload, b"new");
    let older = Capability { columns: vec![(3, 1)], ..newer.clone() };
    assert_eq!(peer.try_open(&older).code(), Code::StaleLayout, "epochs outlive the memory");
    peer.open(&newer);
}

#[test]
fn stop_drains() {
    let bench = Bench::start();
    let (mut busy, mut idle) = (bench.peer(), bench.peer());
    let handle = busy.open(&capability());
    let bytes = pattern(50_000, 1);
    let frame = busy.write_frame(handle, 0, &bytes);
    let all = Peer::bytes(frame, &bytes);
    busy.stream.write_all(&all[..all.len() - 1]).unwrap();
    while bench.node.store().arena().used() == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| bench.node.stop(Duration::from_secs(9)));
        // Stopping shows in the answers of the idle connection.
        while idle.ping().code() != Code::ShuttingDown {
            std::thread::sleep(Duration::from_millis(5));
        }
        let late = idle.control(Opcode::Stat, serde_json::json!([]));
        assert_eq!(late.code(), Code::ShuttingDown);
        assert!(!bench.node.wait(Duration::ZERO), "a request still runs");
        busy.stream.write_all(&all[all.len() - 1..]).unwrap();
        assert_eq!(busy.answer().code(), Code::Ok, "what had begun is finished");
        stopping.join().unwrap().unwrap();
    });
    assert!(bench.node.wait(Duration::ZERO));
    assert!(busy.is_closed() && idle.is_closed());
    bench.node.stop(Duration::ZERO).unwrap();
}

#[test]
fn the_grace_ends() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    let frame = peer.write_frame(handle, 0, &[1; 1000]);
    peer.stream.write_all(&Peer::bytes(frame, &[1; 1000])[..800]).unwrap();
    while bench.node.store().arena().used() == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let begun = Instant::now();
    bench.node.stop(Duration::from_millis(200)).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(200) && begun.elapsed() < Duration::from_secs(5));
    assert!(peer.is_closed());
    assert_eq!(bench.node.store().arena().used(), 0);
}

#[test]
fn an_idle_node_stops_at_once() {
    let bench = Bench::start();
    let _idle = bench.peer();
    let begun = Instant::now();
    assert!(!bench.node.wait(Duration::from_millis(10)));
    bench.node.stop(Duration::from_secs(60)).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_thread_that_hangs_does_not_hold_up_a_stop_nor_lose_its_memory() {
    let bench = Bench::start();
    let mut peer = bench.peer();
    let handle = peer.open(&capability());
    peer.write(handle, 0, &pattern(1000, 1));
    let column = bench.node.store().get(u128::from_str_radix(FILE, 16).unwrap(), 0).unwrap();
    let (locked, is_locked) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let ticket = now(column.begin_write(1, 0, 5000, 1)).unwrap();
        scope.spawn(move || {
            // Whoever is asked here holds the column's lock: to the node's thread, a system call that does not come back.
            let hang = || {
                let _ = locked.send(());
                released.recv().is_err()
            };
            // SAFETY: nobody writes into the target.
            assert!(now(unsafe { ticket.publish(&[0], None, hang) }).is_err());
        });
        is_locked.recv().unwrap();
        let frame = peer.read_frame(handle, 0, 1000);
        peer.stream.write_all(&Peer::bytes(frame, &[])).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let begun = Instant::now();
        let Bench { node, directory, .. } = bench;
        std::thread::scope(|both| {
            both.spawn(|| node.stop(Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(50));
            node.stop(Duration::from_millis(100)).unwrap();
        });
        drop(node);
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        // The thread finds all that it uses.
        drop(release);
        drop(directory);
    });
    let view = now(column.read(1, 0, 1000, true)).unwrap();
    assert_eq!(view.bytes(), pattern(1000, 1));
}

#[test]
fn a_socket_goes_with_its_node_and_nothing_else_does() {
    use std::os::unix::fs::FileTypeExt;
    use std::os::unix::net::UnixListener;
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("node.shm");
    let start = || Bench::start_with(|config| config.shm = path.to_str().unwrap().into());
    let is_socket = || fs::symlink_metadata(&path).is_ok_and(|there| there.file_type().is_socket());

    let bench = start();
    assert_eq!(bench.local_peer().ping().code(), Code::Ok);
    let error = bench.start_another(|config| {
        config.data_dir = place.path().join("another");
    });
    assert!(error.err().unwrap().to_string().contains("another process listens"));
    assert!(is_socket(), "whoever was refused leaves it alone");
    bench.node.stop(Duration::ZERO).unwrap();
    assert!(!path.exists(), "the socket stays behind");

    // That of a node which was killed makes room for the next.
    drop(UnixListener::bind(&path).unwrap());
    let bench = start();
    assert_eq!(bench.local_peer().ping().code(), Code::Ok);
    // Somebody took the name over: it is not the node's to remove.
    fs::remove_file(&path).unwrap();
    let other = UnixListener::bind(&path).unwrap();
    drop(bench);
    assert!(is_socket());
    drop(other);
    fs::remove_file(&path).unwrap();

    fs::write(&path, b"precious").unwrap();
    let bench = Bench::start();
    let error = bench.start_another(|config| {
        config.data_dir = place.path().join("third");
        config.shm = path.to_str().unwrap().into();
    });
    assert!(error.err().unwrap().to_string().contains("no socket"));
    drop(bench);
    assert_eq!(fs::read(&path).unwrap(), b"precious");
}

#[test]
fn a_listener_that_has_no_room_does_not_hold_up_a_start() {
    use socket2::{Domain, SockAddr, Socket, Type};
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("node.shm");
    let address = SockAddr::unix(&path).unwrap();
    let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    listener.bind(&address).unwrap();
    listener.listen(0).unwrap();
    let waiting: Vec<Socket> = (0..2)
        .map(|_| {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        })
        .take_while(|socket| socket.connect(&address).is_ok())
        .collect();
    assert_eq!(waiting.len(), 1, "it has room for one, and none for another");
    let (sender, started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let bench = Bench::start();
        let error = bench.start_another(|config| {
            config.data_dir = bench.config.data_dir.join("another");
            config.shm = path.to_str().unwrap().into();
        });
        // The test may have given up.
        let _ = sender.send(error.err().map(|error| error.to_string()));
    });
    let error = started.recv_timeout(Duration::from_secs(5)).expect("the start waits for room");
    assert!(error.unwrap().contains("another process listens there"));
    drop((listener, waiting));
}

#[test]
fn one_node_per_data_directory() {
    let bench = Bench::start();
    let error = bench.start_another(|_| ()).err().unwrap().to_string();
    assert!(error.contains("another process uses this data directory"), "{error}");
}

#[test]
fn foreign_and_damaged_directories_are_refused_by_name() {
    let bench = Bench::start();
    let path = bench.config.data_dir.join("superblock");
    bench.node.stop(Duration::ZERO).unwrap();
    let Bench { node, config, directory } = bench;
    drop(node);
    let start = |change: &dyn Fn(&mut Config)| {
        let mut config = config.clone();
        config.incarnation += 1;
        change(&mut config);
        Node::start(config).err().unwrap().to_string()
    };
    assert!(start(&|c| c.cluster = "other".into()).contains("belongs to cluster \"test\", not \"other\""));
    assert!(start(&|c| c.node = "n2".into()).contains("belongs to node \"n1\", not \"n2\""));
    assert!(start(&|c| c.incarnation = 1).contains("incarnation 1 is not above 1"));
    assert!(
        start(&|c| c.listen = vec!["tcp://192.0.2.1:1".into()]).contains("192.0.2.1:1 cannot be listened on")
    );
    let good = fs::read(&path).unwrap();
    let spoiled = |change: &dyn Fn(&mut Vec<u8>), reseal: bool| {
        let mut bytes = good.clone();
        change(&mut bytes);
        if reseal {
            let end = bytes.len() - 4;
            let sum = gd2fs_wire::sums::crc32c(&bytes[..end]).to_le_bytes();
            bytes[end..].copy_from_slice(&sum);
        }
        fs::write(&path, bytes).unwrap();
        start(&|c| c.incarnation = 10)
    };
    assert!(spoiled(&|b| b[8] = 7, true).contains("format 7.0, this node reads 1.x"));
    assert!(spoiled(&|b| b[30] ^= 4, false).contains("damaged"));
    fs::write(&path, &good).unwrap();
    let again = Node::start(Config { incarnation: 11, ..config.clone() }).unwrap();
    let mut peer = Peer::connect(&again).greeted(&hello("t", Role::Client));
    assert_eq!(peer.ping().header.incarnation, 11);
    drop((again, directory));
}
