package duemq.peer;

import java.util.Arrays;
import java.util.BitSet;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * A load on a broker, made with Apache's client, for the benchmarks. One JSON line a run.
 *
 * <pre>
 *   send    nameserver=HOST:PORT topic=T count=N [threads=8] [window=256] [size=1024] [sync=true] [rate=PER_SECOND]
 *           [level=L delay=MS] [warm=N]
 *   consume nameserver=HOST:PORT topic=T group=G count=N [timeout=SECONDS]
 * </pre>
 *
 * Each message carries "due" (ms since the epoch) and its number, so that consume tells lateness, what was lost and
 * what came twice. stored_* is about the time at which the broker put a message into its topic, last_ms (since the
 * epoch) when the last message came. rate sends on a schedule that does not slow down when the broker does.
 */
public final class Load {
    private final Map<String, String> arguments;

    private Load(Map<String, String> arguments) {
        this.arguments = arguments;
    }

    public static void main(String[] words) throws Exception {
        Map<String, String> arguments = new HashMap<>();
        for (int i = 1; i < words.length; i++) {
            String[] pair = words[i].split("=", 2);
            arguments.put(pair[0], pair[1]);
        }
        Load load = new Load(arguments);
        System.out.println(words[0].equals("send") ? load.send() : load.consume());
        System.exit(0);
    }

    private int number(String name, int otherwise) {
        return Integer.parseInt(arguments.getOrDefault(name, Integer.toString(otherwise)));
    }

    private String send() throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("load_producer");
        producer.setNamesrvAddr(arguments.get("nameserver"));
        producer.setInstanceName("load-" + System.nanoTime());
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.setSendMsgTimeout(10000);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setRetryTimesWhenSendAsyncFailed(0);
        producer.start();
        run(producer, number("warm", 1000), "warm", 0);
        String result = run(producer, number("count", 0), "load", number("rate", 0));
        producer.shutdown();
        return result;
    }

    /** Sends count messages with one tag, and waits for all answers. */
    private String run(DefaultMQProducer producer, int count, String tag, int rate) throws Exception {
        String topic = arguments.get("topic");
        boolean sync = Boolean.parseBoolean(arguments.getOrDefault("sync", "false"));
        int level = tag.equals("load") ? number("level", 0) : 0;
        int delay = level > 0 ? number("delay", 0) : 0;
        byte[] body = new byte[number("size", 1024)];
        Arrays.fill(body, (byte) 'x');
        Semaphore window = new Semaphore(number("window", 256));
        AtomicInteger next = new AtomicInteger();
        AtomicInteger failed = new AtomicInteger();
        CountDownLatch done = new CountDownLatch(count);
        int[] latency = new int[count];
        long start = System.nanoTime();
        Runnable work = () -> {
            for (int n = next.getAndIncrement(); n < count; n = next.getAndIncrement()) {
                int current = n;
                try {
                    if (rate > 0) {
                        long wait = start + n * 1_000_000_000L / rate - System.nanoTime();
                        if (wait > 0) {
                            TimeUnit.NANOSECONDS.sleep(wait);
                        }
                    }
                    Message message = new Message(topic, tag, body);
                    if (level > 0) {
                        message.setDelayTimeLevel(level);
                    }
                    message.putUserProperty("due", Long.toString(System.currentTimeMillis() + delay));
                    message.putUserProperty("number", Integer.toString(n));
                    long before = System.nanoTime();
                    if (sync) {
                        if (producer.send(message).getSendStatus() != SendStatus.SEND_OK) {
                            failed.incrementAndGet();
                        }
                        latency[n] = (int) ((System.nanoTime() - before) / 1000);
                        done.countDown();
                        continue;
                    }
                    window.acquire();
                    producer.send(message, new SendCallback() {
                        @Override
                        public void onSuccess(SendResult result) {
                            if (result.getSendStatus() != SendStatus.SEND_OK) {
                                failed.incrementAndGet();
                            }
                            end();
                        }

                        @Override
                        public void onException(Throwable error) {
                            failed.incrementAndGet();
                            end();
                        }

                        private void end() {
                            latency[current] = (int) ((System.nanoTime() - before) / 1000);
                            window.release();
                            done.countDown();
                        }
                    });
                } catch (Exception error) {
                    failed.incrementAndGet();
                    done.countDown();
                }
            }
        };
        Thread[] threads = new Thread[number("threads", 8)];
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(work);
            threads[i].start();
        }
        done.await();
        double seconds = (System.nanoTime() - start) / 1e9;
        Arrays.sort(latency);
        return String.format(
            "{\"count\":%d,\"failed\":%d,\"seconds\":%.3f,\"per_second\":%.0f,\"p50_us\":%d,\"p99_us\":%d}",
            count, failed.get(), seconds, count / seconds, part(latency, 0.5), part(latency, 0.99));
    }

    private String consume() throws Exception {
        int count = number("count", 0);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(arguments.get("group"));
        consumer.setNamesrvAddr(arguments.get("nameserver"));
        consumer.setInstanceName("load-" + System.nanoTime());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(32);
        consumer.setPullThresholdForQueue(10000);
        consumer.subscribe(arguments.get("topic"), "load");
        Received received = new Received(count);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            received.add(messages);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        received.done.await(number("timeout", 120), TimeUnit.SECONDS);
        consumer.shutdown();
        return received.result();
    }

    private static int part(int[] sorted, double part) {
        return sorted.length == 0 ? 0 : sorted[Math.min(sorted.length - 1, (int) (sorted.length * part))];
    }

    /** What has arrived so far. */
    private static final class Received {
        final CountDownLatch done = new CountDownLatch(1);
        private final BitSet seen;
        private final int[] late;
        private final int[] storedLate;
        private int got;
        private int twice;
        private long first;
        private long last;

        Received(int count) {
            seen = new BitSet(count);
            late = new int[count];
            storedLate = new int[count];
        }

        synchronized void add(Iterable<MessageExt> messages) {
            long now = System.currentTimeMillis();
            first = first == 0 ? now : first;
            last = now;
            for (MessageExt message : messages) {
                int number = Integer.parseInt(message.getUserProperty("number"));
                if (seen.get(number)) {
                    twice++;
                    continue;
                }
                seen.set(number);
                long due = Long.parseLong(message.getUserProperty("due"));
                late[got] = (int) (now - due);
                storedLate[got] = (int) (message.getStoreTimestamp() - due);
                got++;
            }
            if (got == late.length) {
                done.countDown();
            }
        }

        synchronized String result() {
            int[] all = Arrays.copyOf(late, got);
            int[] stored = Arrays.copyOf(storedLate, got);
            Arrays.sort(all);
            Arrays.sort(stored);
            double seconds = Math.max(1, last - first) / 1000.0;
            return String.format(
                "{\"got\":%d,\"lost\":%d,\"twice\":%d,\"seconds\":%.3f,\"per_second\":%.0f,\"late_min_ms\":%d,"
                    + "\"late_p50_ms\":%d,\"late_p99_ms\":%d,\"stored_late_min_ms\":%d,\"stored_late_p50_ms\":%d,"
                    + "\"stored_late_p99_ms\":%d,\"last_ms\":%d}",
                got, late.length - got, twice, seconds, got / seconds, part(all, 0), part(all, 0.5), part(all, 0.99),
                part(stored, 0), part(stored, 0.5), part(stored, 0.99), last);
        }
    }
}
