"""A hotel that takes part in sagas of Backstep, with a database of its own (SQLite). The rules that
take() keeps are in docs/messages.md, "Taking part in a saga"."""
import json, os, sqlite3, time
import pika

EXCHANGE, PARKED, QUEUE = "backstep.commands", "backstep.parked", "hotel"
ECHOED = ("x-saga-id", "x-saga-type", "x-step", "x-direction", "x-attempt", "x-request-id", "traceparent", "tracestate")
SCHEMA = """CREATE TABLE IF NOT EXISTS hotel (id INTEGER PRIMARY KEY, free INTEGER NOT NULL);
INSERT OR IGNORE INTO hotel VALUES (1, 10);
CREATE TABLE IF NOT EXISTS barriers (saga_id, step, state, command_id, answer, PRIMARY KEY (saga_id, step));"""

def book(db, stay):
    if stay["nights"] > 14:  # no repetition can cure it
        return {"status": "refused", "error": f"{stay['nights']} nights are too many"}
    db.execute("UPDATE hotel SET free = free - 1")
    return {"status": "completed", "result": {"rooms": 1}}

def give_back(db, stay, booking):
    db.execute("UPDATE hotel SET free = free + ?", (booking["rooms"],))

def take(db, saga, step, direction, command, stay):
    """Returns the answer to one copy of a command; called in a transaction that holds the write lock."""
    state, by, answer = db.execute("SELECT state, command_id, answer FROM barriers WHERE saga_id = ? AND step = ?",
                                   (saga, step)).fetchone() or (None, None, "null")
    answer = json.loads(answer)
    if direction == "compensate":
        if state == "COMPLETED":
            give_back(db, stay, answer["result"])
        state, answer = "COMPENSATED", {"status": "completed"}
    elif state == "COMPENSATED":
        return {"status": "refused", "error": "it has been compensated: the action comes too late"}
    elif state is None or state == "REFUSED" and by != command:
        db.execute("SAVEPOINT action")
        answer = book(db, stay)
        if answer["status"] == "refused":
            db.execute("ROLLBACK TO action")
        state = answer["status"].upper()
    db.execute("INSERT OR REPLACE INTO barriers VALUES (?, ?, ?, ?, ?)", (saga, step, state, command, json.dumps(answer)))
    return answer

def handle(channel, method, properties, body):
    try:
        h, command, reply_to = properties.headers, properties.message_id, properties.reply_to
        saga, step, direction, stay = h["x-saga-id"], h["x-step"], h["x-direction"], json.loads(body)["input"]
        if not command or not reply_to or direction not in ("execute", "compensate"):
            raise ValueError("no message_id, reply_to or x-direction")
    except (KeyError, TypeError, ValueError) as e:
        print("not a saga's command:", repr(e), flush=True)
        return channel.basic_reject(method.delivery_tag, requeue=False)
    try:
        with db:  # commits, or rolls back
            db.execute("BEGIN IMMEDIATE")
            answer = take(db, saga, step, direction, command, stay)
    except (KeyError, TypeError) as e:  # what is wrong here today may be right after the next deploy
        answer = {"status": "failed", "error": repr(e)}
    channel.basic_publish(EXCHANGE, reply_to, json.dumps(answer).encode(), pika.BasicProperties(
        message_id="re:" + command, type="saga.reply", correlation_id=saga, content_type="application/json",
        timestamp=int(time.time()), delivery_mode=2, headers={k: h[k] for k in ECHOED if k in h}), mandatory=True)
    channel.basic_ack(method.delivery_tag)

db = sqlite3.connect(os.environ["HOTEL_DB"], isolation_level=None, timeout=30)
db.execute("PRAGMA journal_mode = WAL")
db.executescript(SCHEMA)
channel = pika.BlockingConnection(pika.URLParameters(os.environ["AMQP_URL"])).channel()
for queue, exchange, args in ((QUEUE + ".parked", PARKED, {"x-delivery-limit": 2**31 - 1}), (QUEUE, EXCHANGE, {
        "x-delivery-limit": 20, "x-dead-letter-exchange": PARKED, "x-dead-letter-routing-key": QUEUE, "x-dead-letter-strategy": "at-least-once"})):
    # Without reject-publish, at-least-once dead-lettering may lose messages.
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum", "x-overflow": "reject-publish", **args})
    channel.queue_bind(queue, exchange, QUEUE)
channel.confirm_delivery()  # basic_publish raises what the broker did not take; then we end without an ack
channel.basic_qos(prefetch_count=1)
channel.basic_consume(QUEUE, handle)
print("ready: consuming queue", QUEUE, flush=True)
channel.start_consuming()
