package duemq.peer;

import com.alibaba.fastjson.JSONObject;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** Where the 4.9 and the 5.x client differ in names: this is the 5.x side. */
final class Compat {
    private Compat() {
    }

    /** Consumers have instances of another kind than producers, unless a producer says it is of theirs. */
    static void shareWithConsumer(DefaultMQProducer producer) {
        producer.setEnableStreamRequestType(true);
    }

    static void setBroadcasting(DefaultMQPushConsumer consumer) {
        consumer.setMessageModel(MessageModel.BROADCASTING);
    }

    static void commit(DefaultLitePullConsumer consumer) {
        consumer.commitSync();
    }

    /** A timer by the library's own methods: they are not known to 4.9, though its properties are. */
    static void setTimer(Message message, JSONObject timer) {
        timer.forEach((name, value) -> {
            long number = Long.parseLong(String.valueOf(value));
            switch (name) {
                case "deliver_ms" -> message.setDeliverTimeMs(number);
                case "delay_ms" -> message.setDelayTimeMs(number);
                case "delay_sec" -> message.setDelayTimeSec(number);
                default -> throw new IllegalArgumentException("no such timer");
            }
        });
    }

    static String recallHandle(SendResult result) {
        return result.getRecallHandle();
    }

    static String recall(DefaultMQProducer producer, String topic, String handle) throws Exception {
        return producer.recallMessage(topic, handle);
    }

    static void setAttributes(TopicConfig config, JSONObject attributes) {
        if (attributes != null) {
            attributes.forEach((name, value) -> config.getAttributes().put(name, String.valueOf(value)));
        }
    }

    static void deleteTopicInNameServer(DefaultMQAdminExt admin, Set<String> addresses, String topic) throws Exception {
        admin.deleteTopicInNameServer(addresses, topic);
    }

    static void createGroup(DefaultMQAdminExt admin, JSONObject request) throws Exception {
        SubscriptionGroupConfig config = new SubscriptionGroupConfig();
        config.setGroupName(request.getString("group"));
        config.setRetryMaxTimes(request.getIntValue("retry_max_times"));
        config.setRetryQueueNums(request.getIntValue("retry_queues"));
        config.setConsumeEnable(request.getBooleanValue("enable"));
        admin.createAndUpdateSubscriptionGroupConfig(request.getString("broker"), config);
    }
}
