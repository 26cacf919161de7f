package duemq.peer;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicReferenceArray;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.MessageQueueSelector;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/** The producers of this process, by handle. */
final class Producers {
    private static final MessageQueueSelector BY_KEY = new SelectMessageQueueByHash();
    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();
    private final Map<String, Holder> holders = new ConcurrentHashMap<>();

    /** A message with the queue it has to go to: a selector and its argument, or null for the library's choice. */
    private record Addressed(Message message, MessageQueueSelector selector, Object argument) {
    }

    JSONObject start(JSONObject request) throws Exception {
        String handle = request.getString("handle");
        String traces = request.getString("trace_topic");
        DefaultMQProducer producer =
            new DefaultMQProducer(request.getString("group"), Keys.hook(request), traces != null, traces);
        Messages.configure(producer, request, handle);
        if (request.containsKey("timeout_ms")) {
            producer.setSendMsgTimeout(request.getIntValue("timeout_ms"));
        }
        if (request.containsKey("retries")) {
            producer.setRetryTimesWhenSendFailed(request.getIntValue("retries"));
            producer.setRetryTimesWhenSendAsyncFailed(request.getIntValue("retries"));
        }
        if (request.containsKey("compress_over")) {
            producer.setCompressMsgBodyOverHowmuch(request.getIntValue("compress_over"));
        }
        holders.put(handle, Holder.forProducer(request, handle));
        producer.start();
        producers.put(handle, producer);
        return new JSONObject();
    }

    JSONObject stop(JSONObject request) {
        String handle = request.getString("handle");
        producers.remove(handle).shutdown();
        holders.remove(handle).closeInBackground();
        return new JSONObject();
    }

    JSONObject send(JSONObject request) throws Exception {
        DefaultMQProducer producer = producers.get(request.getString("handle"));
        List<Addressed> messages = new ArrayList<>();
        for (Object item : request.getJSONArray("messages")) {
            messages.add(addressed(request, (JSONObject) item));
        }
        JSONArray results = switch (request.getString("mode")) {
            case "sync" -> sync(producer, messages);
            case "async" -> async(producer, messages);
            case "oneway" -> oneway(producer, messages);
            case "batch" -> batch(producer, messages, request.getInteger("queue_id"));
            default -> throw new IllegalArgumentException("no such mode");
        };
        JSONObject result = new JSONObject();
        result.put("results", results);
        return result;
    }

    JSONObject recall(JSONObject request) throws Exception {
        DefaultMQProducer producer = producers.get(request.getString("handle"));
        JSONObject result = new JSONObject();
        result.put("msg_id",
            Compat.recall(producer, request.getString("topic"), request.getString("recall_handle")));
        return result;
    }

    private static Addressed addressed(JSONObject request, JSONObject json) {
        Message message = Messages.toSend(request.getString("topic"), json);
        if (request.containsKey("queue_id")) {
            return new Addressed(message, (queues, m, id) -> queue(queues, (Integer) id), request.getInteger("queue_id"));
        }
        if (json.containsKey("sharding")) {
            return new Addressed(message, BY_KEY, json.getString("sharding"));
        }
        return new Addressed(message, null, null);
    }

    private static MessageQueue queue(List<MessageQueue> queues, int id) {
        return queues.stream().filter(q -> q.getQueueId() == id).findFirst().orElseThrow();
    }

    private static JSONArray sync(DefaultMQProducer producer, List<Addressed> messages) {
        JSONArray results = new JSONArray();
        for (Addressed to : messages) {
            try {
                results.add(Messages.sent(to.selector == null
                    ? producer.send(to.message)
                    : producer.send(to.message, to.selector, to.argument)));
            } catch (Exception e) {
                results.add(Messages.failed(e));
            }
        }
        return results;
    }

    private static JSONArray async(DefaultMQProducer producer, List<Addressed> messages) throws InterruptedException {
        AtomicReferenceArray<JSONObject> answers = new AtomicReferenceArray<>(messages.size());
        CountDownLatch open = new CountDownLatch(messages.size());
        for (int i = 0; i < messages.size(); i++) {
            final int n = i;
            Addressed to = messages.get(i);
            SendCallback callback = new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    end(Messages.sent(result));
                }

                @Override
                public void onException(Throwable e) {
                    end(Messages.failed(e));
                }

                private void end(JSONObject answer) {
                    answers.set(n, answer);
                    open.countDown();
                }
            };
            try {
                if (to.selector == null) {
                    producer.send(to.message, callback);
                } else {
                    producer.send(to.message, to.selector, to.argument, callback);
                }
            } catch (Exception e) {
                callback.onException(e);
            }
        }
        open.await();
        JSONArray results = new JSONArray();
        for (int i = 0; i < answers.length(); i++) {
            results.add(answers.get(i));
        }
        return results;
    }

    private static JSONArray oneway(DefaultMQProducer producer, List<Addressed> messages) {
        JSONArray results = new JSONArray();
        for (Addressed to : messages) {
            try {
                if (to.selector == null) {
                    producer.sendOneway(to.message);
                } else {
                    producer.sendOneway(to.message, to.selector, to.argument);
                }
                JSONObject result = new JSONObject();
                result.put("status", "SENT");
                results.add(result);
            } catch (Exception e) {
                results.add(Messages.failed(e));
            }
        }
        return results;
    }

    private static JSONArray batch(DefaultMQProducer producer, List<Addressed> messages, Integer queueId) {
        List<Message> parts = messages.stream().map(Addressed::message).toList();
        JSONArray results = new JSONArray();
        try {
            String topic = parts.get(0).getTopic();
            results.add(Messages.sent(queueId == null
                ? producer.send(parts)
                : producer.send(parts, queue(producer.fetchPublishMessageQueues(topic), queueId))));
        } catch (Exception e) {
            results.add(Messages.failed(e));
        }
        return results;
    }
}
