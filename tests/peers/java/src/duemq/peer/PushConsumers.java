package duemq.peer;

import com.alibaba.fastjson.JSONObject;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Consumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/** The push consumers of this process, by handle. Each message they get is told as an event. */
final class PushConsumers {
    private final Map<String, DefaultMQPushConsumer> consumers = new ConcurrentHashMap<>();
    private final Map<String, Holder> holders = new ConcurrentHashMap<>();
    private final Consumer<JSONObject> tell;

    PushConsumers(Consumer<JSONObject> tell) {
        this.tell = tell;
    }

    JSONObject start(JSONObject request) throws Exception {
        String handle = request.getString("handle");
        int failFirst = request.getIntValue("fail_first");
        String traces = request.getString("trace_topic");
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(
            request.getString("group"), Keys.hook(request), new AllocateMessageQueueAveragely(), traces != null, traces);
        Messages.configure(consumer, request, handle);
        String begin = request.getString("begin");
        if (begin.startsWith("time:")) {
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_TIMESTAMP);
            consumer.setConsumeTimestamp(begin.substring("time:".length()));
        } else {
            consumer.setConsumeFromWhere("last".equals(begin)
                ? ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET : ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        }
        if ("broadcast".equals(request.getString("model"))) {
            Compat.setBroadcasting(consumer);
        }
        consumer.setAwaitTerminationMillisWhenShutdown(5000); // so that what was just told is committed as well
        if (request.containsKey("max_reconsume_times")) {
            consumer.setMaxReconsumeTimes(request.getIntValue("max_reconsume_times"));
        }
        for (Object item : request.getJSONArray("subscriptions")) {
            JSONObject subscription = (JSONObject) item;
            consumer.subscribe(subscription.getString("topic"), subscription.getString("expression"));
        }
        if (request.getBooleanValue("orderly")) {
            consumer.setSuspendCurrentQueueTimeMillis(100);
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) ->
                tellAll(handle, failFirst, messages)
                    ? ConsumeOrderlyStatus.SUCCESS : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT);
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) ->
                tellAll(handle, failFirst, messages)
                    ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER);
        }
        holders.put(handle, Holder.forConsumer(request, handle));
        consumer.start();
        consumers.put(handle, consumer);
        return new JSONObject();
    }

    JSONObject stop(JSONObject request) {
        String handle = request.getString("handle");
        consumers.remove(handle).shutdown();
        holders.remove(handle).closeInBackground();
        return new JSONObject();
    }

    /** Tells the messages (one, as the consume batch size is left at 1); returns whether they count as consumed. */
    private boolean tellAll(String handle, int failFirst, List<MessageExt> messages) {
        boolean success = true;
        for (MessageExt message : messages) {
            JSONObject event = new JSONObject();
            event.put("event", "message");
            event.put("consumer", handle);
            event.put("message", Messages.received(message));
            tell.accept(event);
            success &= message.getReconsumeTimes() >= failFirst;
        }
        return success;
    }
}
