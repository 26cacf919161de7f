package duemq.peer;

import com.alibaba.fastjson.JSONObject;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.protocol.heartbeat.MessageModel;
import org.apache.rocketmq.common.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** Where the 4.9 and the 5.x client differ in names: this is the 4.9 side. */
final class Compat {
    private Compat() {
    }

    /** Consumers and producers with one instance name share an instance anyway. */
    static void shareWithConsumer(DefaultMQProducer producer) {
    }

    static void setBroadcasting(DefaultMQPushConsumer consumer) {
        consumer.setMessageModel(MessageModel.BROADCASTING);
    }

    static void commit(DefaultLitePullConsumer consumer) {
        consumer.commitSync();
    }

    static void setTimer(Message message, JSONObject timer) {
        throw new IllegalArgumentException("messages of 4.9 have no timers");
    }

    static String recallHandle(SendResult result) {
        return null;
    }

    static String recall(DefaultMQProducer producer, String topic, String handle) {
        throw new IllegalArgumentException("producers of 4.9 recall nothing");
    }

    static void setAttributes(TopicConfig config, JSONObject attributes) {
        if (attributes != null) {
            throw new IllegalArgumentException("topics of 4.9 have no attributes");
        }
    }

    static void deleteTopicInNameServer(DefaultMQAdminExt admin, Set<String> addresses, String topic) throws Exception {
        admin.deleteTopicInNameServer(addresses, topic, null);
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
