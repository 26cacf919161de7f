package duemq.peer;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * The Java admin API (DefaultMQAdminExt). The request's `call` names one of the methods below; the objects it returns
 * are told field by field, with queues as `topic@queue`, since JSON has no objects as keys.
 */
final class Admins {
    private static final AtomicInteger NUMBER = new AtomicInteger();
    private final Recent<DefaultMQAdminExt> admins = new Recent<>(DefaultMQAdminExt::shutdown);

    JSONObject call(JSONObject request) throws Exception {
        String name = request.getString("nameserver") + " as " + request.getString("access_key");
        DefaultMQAdminExt admin = admins.take(name, () -> started(request));
        try {
            return call(admin, request);
        } finally {
            admins.giveBack(name);
        }
    }

    private static JSONObject call(DefaultMQAdminExt admin, JSONObject request) throws Exception {
        JSONObject result = new JSONObject();
        switch (request.getString("call")) {
            case "create_topic" -> createTopic(admin, request);
            case "delete_topic" -> deleteTopic(admin, request);
            case "create_group" -> Compat.createGroup(admin, request);
            case "delete_group" -> admin.deleteSubscriptionGroup(
                request.getString("broker"), request.getString("group"), request.getBooleanValue("remove_offset"));
            case "topics" -> result.put("topics", new TreeSet<>(admin.fetchAllTopicList().getTopicList()));
            case "route" -> result.put("route", route(admin, request.getString("topic")));
            case "topic_stats" -> result.put("queues", topicStats(admin, request.getString("topic")));
            case "consume_stats" -> consumeStats(admin, request, result);
            case "runtime_stats" -> result.put("table",
                admin.fetchBrokerRuntimeStats(request.getString("broker")).getTable());
            case "cluster" -> cluster(admin, result);
            case "consumer_connection" -> consumerConnection(admin, request.getString("group"), result);
            case "producer_connection" -> result.put("clients", producerConnection(admin, request));
            case "running_info" -> runningInfo(admin, request, result);
            case "who_consumes" -> result.put("groups",
                new TreeSet<>(admin.queryTopicConsumeByWho(request.getString("topic")).getGroupList()));
            case "reset_offset" -> result.put("offsets", offsets(admin.resetOffsetByTimestamp(request.getString("topic"),
                request.getString("group"), request.getLongValue("timestamp"), true)));
            case "query_by_key" -> result.put("messages", Messages.received(admin.queryMessage(
                request.getString("topic"), request.getString("key"), 32, 0, Long.MAX_VALUE).getMessageList()));
            case "view" -> result.put("message",
                Messages.received(admin.viewMessage(request.getString("topic"), request.getString("msg_id"))));
            case "broker_config" -> result.put("table", admin.getBrokerConfig(request.getString("broker")));
            case "update_broker_config" -> updateBrokerConfig(admin, request);
            case "update_consumer_offset" -> admin.updateConsumeOffset(request.getString("broker"),
                request.getString("group"), queue(request), request.getLongValue("offset"));
            default -> throw new IllegalArgumentException("no such call");
        }
        return result;
    }

    private static DefaultMQAdminExt started(JSONObject request) throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt(Keys.hook(request), 10_000);
        admin.setNamesrvAddr(request.getString("nameserver"));
        admin.setInstanceName("admin-" + NUMBER.incrementAndGet());
        admin.start();
        return admin;
    }

    private static MessageQueue queue(JSONObject request) {
        return new MessageQueue(
            request.getString("topic"), request.getString("broker_name"), request.getIntValue("queue_id"));
    }

    private static void createTopic(DefaultMQAdminExt admin, JSONObject request) throws Exception {
        TopicConfig config = new TopicConfig(request.getString("topic"));
        config.setReadQueueNums(request.getIntValue("queues"));
        config.setWriteQueueNums(request.getIntValue("queues"));
        config.setPerm(request.getIntValue("perm"));
        config.setOrder(request.getBooleanValue("order"));
        Compat.setAttributes(config, request.getJSONObject("attributes"));
        admin.createAndUpdateTopicConfig(request.getString("broker"), config);
    }

    private static void deleteTopic(DefaultMQAdminExt admin, JSONObject request) throws Exception {
        String topic = request.getString("topic");
        admin.deleteTopicInBroker(Set.of(request.getString("broker")), topic);
        Compat.deleteTopicInNameServer(admin, Set.of(request.getString("nameserver")), topic);
    }

    private static JSONObject route(DefaultMQAdminExt admin, String topic) throws Exception {
        var route = admin.examineTopicRouteInfo(topic);
        JSONObject json = new JSONObject();
        JSONArray queues = new JSONArray();
        for (var data : route.getQueueDatas()) {
            JSONObject queue = new JSONObject();
            queue.put("broker", data.getBrokerName());
            queue.put("read", data.getReadQueueNums());
            queue.put("write", data.getWriteQueueNums());
            queue.put("perm", data.getPerm());
            queues.add(queue);
        }
        JSONObject brokers = new JSONObject();
        for (var data : route.getBrokerDatas()) {
            brokers.put(data.getBrokerName(), data.getBrokerAddrs());
        }
        json.put("queues", queues);
        json.put("brokers", brokers);
        json.put("order_conf", route.getOrderTopicConf());
        return json;
    }

    private static JSONObject topicStats(DefaultMQAdminExt admin, String topic) throws Exception {
        JSONObject queues = new JSONObject();
        for (var entry : admin.examineTopicStats(topic).getOffsetTable().entrySet()) {
            JSONObject stats = new JSONObject();
            stats.put("min", entry.getValue().getMinOffset());
            stats.put("max", entry.getValue().getMaxOffset());
            stats.put("last_update", entry.getValue().getLastUpdateTimestamp());
            queues.put(name(entry.getKey()), stats);
        }
        return queues;
    }

    private static void consumeStats(DefaultMQAdminExt admin, JSONObject request, JSONObject result) throws Exception {
        var stats = admin.examineConsumeStats(request.getString("group"), request.getString("topic"));
        JSONObject queues = new JSONObject();
        for (var entry : stats.getOffsetTable().entrySet()) {
            JSONObject offsets = new JSONObject();
            offsets.put("broker", entry.getValue().getBrokerOffset());
            offsets.put("consumer", entry.getValue().getConsumerOffset());
            offsets.put("last_time", entry.getValue().getLastTimestamp());
            queues.put(name(entry.getKey()), offsets);
        }
        result.put("queues", queues);
        result.put("diff", stats.computeTotalDiff());
        result.put("tps", stats.getConsumeTps());
    }

    private static void cluster(DefaultMQAdminExt admin, JSONObject result) throws Exception {
        var cluster = admin.examineBrokerClusterInfo();
        JSONObject brokers = new JSONObject();
        cluster.getBrokerAddrTable().forEach((name, data) -> brokers.put(name, data.getBrokerAddrs()));
        result.put("clusters", cluster.getClusterAddrTable());
        result.put("brokers", brokers);
    }

    private static void consumerConnection(DefaultMQAdminExt admin, String group, JSONObject result) throws Exception {
        var connection = admin.examineConsumerConnectionInfo(group);
        result.put("clients", connection.getConnectionSet());
        result.put("subscriptions", connection.getSubscriptionTable().keySet());
        result.put("type", connection.getConsumeType().name());
        result.put("model", connection.getMessageModel().name());
        result.put("from", connection.getConsumeFromWhere().name());
    }

    private static Object producerConnection(DefaultMQAdminExt admin, JSONObject request) throws Exception {
        return admin.examineProducerConnectionInfo(request.getString("group"), request.getString("topic"))
            .getConnectionSet();
    }

    private static void runningInfo(DefaultMQAdminExt admin, JSONObject request, JSONObject result) throws Exception {
        var info = admin.getConsumerRunningInfo(request.getString("group"), request.getString("client_id"), false);
        result.put("queues", info.getMqTable().keySet().stream().map(Admins::name).sorted().toList());
        result.put("properties", info.getProperties());
    }

    private static JSONObject offsets(Map<MessageQueue, Long> table) {
        JSONObject json = new JSONObject();
        table.forEach((queue, offset) -> json.put(name(queue), offset));
        return json;
    }

    private static void updateBrokerConfig(DefaultMQAdminExt admin, JSONObject request) throws Exception {
        Properties properties = new Properties();
        request.getJSONObject("properties").forEach((name, value) -> properties.put(name, String.valueOf(value)));
        admin.updateBrokerConfig(request.getString("broker"), properties);
    }

    private static String name(MessageQueue queue) {
        return queue.getTopic() + "@" + queue.getQueueId();
    }
}
