package duemq.peer;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Reading queues by offset. A call that names a group of its own has a consumer of its own, so none stays behind in that
 * group; the others share one consumer for each topic.
 */
@SuppressWarnings("deprecation")
final class PullConsumers {
    private static final String SHARED_GROUP = "peer_pull";
    private static final AtomicInteger NUMBER = new AtomicInteger();
    private final Recent<DefaultMQPullConsumer> shared = new Recent<>(DefaultMQPullConsumer::shutdown);

    /** Something to do with a started pull consumer. */
    private interface Use {
        JSONObject with(DefaultMQPullConsumer consumer) throws Exception;
    }

    private JSONObject use(JSONObject request, Use use) throws Exception {
        String group = request.containsKey("group") ? request.getString("group") : SHARED_GROUP;
        if (!group.equals(SHARED_GROUP)) {
            return useOwn(group, request, use);
        }
        String name = String.join(" ", request.getString("nameserver"), "as", request.getString("access_key"), "of",
            request.getString("topic"));
        DefaultMQPullConsumer consumer = shared.take(name, () -> {
            DefaultMQPullConsumer fresh = consumer(group, request, "pull-" + NUMBER.incrementAndGet());
            fresh.setHeartbeatBrokerInterval(30_000);
            fresh.setPollNameServerInterval(30_000);
            fresh.start();
            return fresh;
        });
        try {
            return use.with(consumer);
        } finally {
            shared.giveBack(name);
        }
    }

    private static JSONObject useOwn(String group, JSONObject request, Use use) throws Exception {
        String handle = "pull-" + NUMBER.incrementAndGet();
        DefaultMQPullConsumer consumer = consumer(group, request, handle);
        Holder holder = Holder.forConsumer(request, handle);
        consumer.start();
        try {
            return use.with(consumer);
        } finally {
            consumer.shutdown();
            holder.closeInBackground();
        }
    }

    private static DefaultMQPullConsumer consumer(String group, JSONObject request, String handle) {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(group, Keys.hook(request));
        Messages.configure(consumer, request, handle);
        return consumer;
    }

    private static MessageQueue queue(DefaultMQPullConsumer consumer, JSONObject request) throws Exception {
        String topic = request.getString("topic");
        int id = request.getIntValue("queue_id");
        return consumer.fetchSubscribeMessageQueues(topic).stream()
            .filter(q -> q.getQueueId() == id).findFirst()
            .orElseThrow(() -> new IllegalArgumentException("the route of " + topic + " has no queue " + id));
    }

    JSONObject pull(JSONObject request) throws Exception {
        return use(request, consumer -> {
            PullResult pulled = consumer.pull(queue(consumer, request), request.getString("expression"),
                request.getLongValue("offset"), request.getIntValue("count"));
            JSONObject result = new JSONObject();
            result.put("status", pulled.getPullStatus().name());
            result.put("next_offset", pulled.getNextBeginOffset());
            result.put("min_offset", pulled.getMinOffset());
            result.put("max_offset", pulled.getMaxOffset());
            List<MessageExt> found = pulled.getMsgFoundList();
            result.put("messages", Messages.received(found == null ? List.of() : found));
            return result;
        });
    }

    JSONObject consumerOffset(JSONObject request) throws Exception {
        return use(request, consumer -> {
            JSONObject result = new JSONObject();
            result.put("offset", consumer.fetchConsumeOffset(queue(consumer, request), true));
            return result;
        });
    }

    JSONObject queues(JSONObject request) throws Exception {
        return use(request, consumer -> {
            JSONArray ids = new JSONArray();
            consumer.fetchSubscribeMessageQueues(request.getString("topic")).stream()
                .map(MessageQueue::getQueueId).sorted().forEach(ids::add);
            JSONObject result = new JSONObject();
            result.put("queues", ids);
            return result;
        });
    }

    JSONObject offset(JSONObject request) throws Exception {
        return use(request, consumer -> {
            MessageQueue queue = queue(consumer, request);
            long offset = switch (request.getString("which")) {
                case "min" -> consumer.minOffset(queue);
                case "max" -> consumer.maxOffset(queue);
                case "earliest" -> consumer.earliestMsgStoreTime(queue);
                case "search" -> consumer.searchOffset(queue, request.getLongValue("timestamp"));
                default -> throw new IllegalArgumentException("no such offset");
            };
            JSONObject result = new JSONObject();
            result.put("offset", offset);
            return result;
        });
    }

    /** Receives with the lite pull consumer, which is a member of its group and has queues allotted to it. */
    JSONObject litePull(JSONObject request) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(request.getString("group"), Keys.hook(request));
        String handle = "lite-" + NUMBER.incrementAndGet();
        Messages.configure(consumer, request, handle);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(request.getString("topic"), request.getString("expression"));
        Holder holder = Holder.forConsumer(request, handle);
        consumer.start();
        try {
            int count = request.getIntValue("count");
            long end = System.currentTimeMillis() + request.getLongValue("timeout_ms");
            List<MessageExt> messages = new ArrayList<>();
            while (messages.size() < count && System.currentTimeMillis() < end) {
                messages.addAll(consumer.poll(1000));
            }
            Compat.commit(consumer);
            JSONObject result = new JSONObject();
            result.put("messages", Messages.received(messages));
            return result;
        } finally {
            consumer.shutdown();
            holder.closeInBackground();
        }
    }
}
