-- Binds a request id that the scripts could not read to the owner's message.
-- ARGV: owner, id, request
-- Returns 1, or 0 where that id is another message's, or the lease was no longer the owner's.
if not owned_list(id, owner) then return 0 end
local holder = holder_of(request)
if holder then return holder == id and 1 or 0 end
local record = record_of(id)
if record then -- else somebody has deleted keys by hand
  unbind(id, record)
  record.request = request
  keep(id, record)
end
redis.call('HSET', LEASE_REQUESTS, request, id)
return 1
